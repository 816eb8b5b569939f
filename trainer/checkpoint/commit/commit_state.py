"""How one rank decides on an attempt: events in, the next thing to do out. No message, file, thread or clock is here.

`protocol.py` does what is to be done and tells what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class CommitStage(Enum):
    """What a rank is at. Ranks but 0 go by REPORTING, rank 0 goes by COLLECTING; either may skip to the end."""

    WRITING = "writing its own part"
    REPORTING = "handing in its report"
    AWAITING = "waiting for the decision"
    LOOKING = "looking for the checkpoint, as no decision came"
    COLLECTING = "waiting for the others' reports"
    PREPARING = "making all that the rename needs"
    RENAMING = "renaming: there is no way back"
    ANNOUNCING = "telling the decision"
    ENDED = "through"


class Outcome(Enum):
    """What a rank knows of an attempt that has ended. UNKNOWN: it was not committed yet, but may still be."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Action(Enum):
    """What is to be done next; what comes of it comes back as an event. NOTHING: somebody else is at it."""

    NOTHING = "nothing"
    REPORT = "post the report"
    AWAIT_DECISION = "wait for the decision"
    LOOK = "look whether the checkpoint is there"
    COLLECT = "wait for the reports"
    PUBLISH = "prepare the checkpoint"
    RENAME = "rename it"
    ANNOUNCE = "announce the decision"
    END = "end"


@dataclass(frozen=True, slots=True)
class Wrote:
    """This rank's own part is durable."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank's own part, or rank 0's publishing, has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportStored:
    """This rank's report hangs in the store."""


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """A rank has handed in its report: why its part failed, or None."""

    rank: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class ReadyToRename:
    """Nothing is missing but the rename."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The checkpoint exists."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The decision is out, or cannot be told: either way nothing changes by it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Rank 0 has told why there is no checkpoint, or, with None, that there is one."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class Silence:
    """A message will not come: its time is over, the store is gone, or a rank has given up the run."""

    why: str


@dataclass(frozen=True, slots=True)
class FoundCommitted:
    """The checkpoint of this attempt is there."""


@dataclass(frozen=True, slots=True)
class FoundNothing:
    """The checkpoint of this attempt is not there."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The main thread gives the attempt up: time is over, the disk stalls, or a signal leaves no time."""

    why: str


Event = (
    Wrote
    | Failed
    | ReportStored
    | ReportArrived
    | ReadyToRename
    | Renamed
    | Broadcast
    | Decision
    | Silence
    | FoundCommitted
    | FoundNothing
    | Aborted
)


@dataclass(frozen=True, slots=True)
class CommitState:
    """What a rank knows of an attempt.

    Args:
        missing: on rank 0, the ranks whose report is not in.
        problem: the first reason why it cannot become a checkpoint.
        outcome: set once it is decided, on rank 0 before it is announced.
    """

    rank: int
    missing: frozenset[int]
    stage: CommitStage = CommitStage.WRITING
    problem: str | None = None
    outcome: Outcome | None = None

    @staticmethod
    def of(rank: int, world_size: int) -> CommitState:
        """Return what a rank knows at the start."""
        return CommitState(rank, frozenset(range(1, world_size)) if rank == 0 else frozenset())


def advance(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    """Return what a rank knows after an event, and what is to be done next.

    Invariant: RENAME is asked for once at most, only after every rank's part was reported whole, and never together
    with an announcement that it failed: a rank that aborts before that moment ends the attempt, one that aborts
    later changes nothing. An event that does not belong to the stage, repeated or late, changes nothing either.
    """
    if isinstance(event, Aborted):
        return _aborted(state, event.why)
    if state.stage is CommitStage.ENDED:
        return state, Action.END
    return _advance_rank0(state, event) if state.rank == 0 else _advance_other(state, event)


def _aborted(state: CommitState, why: str) -> tuple[CommitState, Action]:
    is_open = _BEFORE_RENAME if state.rank == 0 else {CommitStage.WRITING}
    if state.stage not in is_open:
        return state, Action.NOTHING
    action = Action.ANNOUNCE if state.rank == 0 else Action.REPORT
    return replace(state, stage=CommitStage.ENDED, problem=state.problem or why, outcome=Outcome.FAILED), action


_BEFORE_RENAME = {CommitStage.WRITING, CommitStage.COLLECTING, CommitStage.PREPARING}


def _advance_rank0(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Wrote():
            return _collected(replace(state, stage=CommitStage.COLLECTING))
        case CommitStage.WRITING, Failed(why):  # the others' reports are still taken down
            return _collected(replace(state, stage=CommitStage.COLLECTING, problem=why))
        case CommitStage.COLLECTING, ReportArrived(rank, problem) if rank in state.missing:
            named = None if problem is None else f"Rank {rank}: {problem}"
            return _collected(replace(state, missing=state.missing - {rank}, problem=state.problem or named))
        case ((CommitStage.COLLECTING | CommitStage.PREPARING | CommitStage.RENAMING), (Silence(why) | Failed(why))):
            return _failed(replace(state, problem=state.problem or why))
        case CommitStage.PREPARING, ReadyToRename():
            return replace(state, stage=CommitStage.RENAMING), Action.RENAME
        case CommitStage.RENAMING, Renamed():
            return replace(state, stage=CommitStage.ANNOUNCING, outcome=Outcome.COMMITTED), Action.ANNOUNCE
        case CommitStage.ANNOUNCING, (Broadcast() | Silence()):
            return replace(state, stage=CommitStage.ENDED), Action.END
    return state, Action.NOTHING


def _collected(state: CommitState) -> tuple[CommitState, Action]:
    """Go on once all reports are in."""
    if state.missing:
        return state, Action.COLLECT
    if state.problem is not None:
        return _failed(state)
    return replace(state, stage=CommitStage.PREPARING), Action.PUBLISH


def _failed(state: CommitState) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.ANNOUNCING, outcome=Outcome.FAILED), Action.ANNOUNCE


def _advance_other(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Wrote():
            return replace(state, stage=CommitStage.REPORTING), Action.REPORT
        case CommitStage.WRITING, Failed(why):
            return replace(state, stage=CommitStage.REPORTING, problem=why), Action.REPORT
        case CommitStage.REPORTING, ReportStored():
            return replace(state, stage=CommitStage.AWAITING), Action.AWAIT_DECISION
        case ((CommitStage.REPORTING | CommitStage.AWAITING), Silence(why)):
            if state.problem is not None:
                return _ended(state, Outcome.FAILED)
            return replace(state, stage=CommitStage.LOOKING, problem=why), Action.LOOK
        case CommitStage.AWAITING, Decision(None):
            return _ended(state, Outcome.COMMITTED if state.problem is None else Outcome.FAILED)
        case CommitStage.AWAITING, Decision(str(why)):
            return _ended(replace(state, problem=state.problem or why), Outcome.FAILED)
        case CommitStage.LOOKING, FoundCommitted():
            return _ended(replace(state, problem=None), Outcome.COMMITTED)
        case CommitStage.LOOKING, FoundNothing():
            return _ended(state, Outcome.UNKNOWN)
    return state, Action.NOTHING


def _ended(state: CommitState, outcome: Outcome) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.ENDED, outcome=outcome), Action.END
