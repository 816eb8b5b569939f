"""Decides the next step of one rank in a two-phase commit: an event in, an action out, and no effects.

`protocol.py` carries the actions out and reports their results as events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class CommitStage(Enum):
    """The stage of a rank. Rank 0, the coordinator, passes COLLECTING, the others REPORTING; all may skip."""

    WRITING = "writing its own part"
    REPORTING = "storing its report"
    AWAITING = "waiting for the decision"
    LOOKING = "looking for the checkpoint, as no decision came"
    COLLECTING = "waiting for the others' reports"
    PREPARING = "writing all that the rename needs"
    RENAMING = "renaming: too late to abort"
    BROADCASTING = "sending the decision"
    ENDED = "ended"


class Outcome(Enum):
    """The outcome of an attempt on a rank. UNKNOWN: in doubt, it was not committed yet but may still be."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Action(Enum):
    """The next action, whose result is an event. NOTHING: another thread acts, or no action is due."""

    NOTHING = "nothing"
    REPORT = "store the report"
    AWAIT_DECISION = "wait for the decision"
    LOOK = "look whether the checkpoint is there"
    COLLECT = "wait for the reports"
    PREPARE = "prepare the checkpoint"
    RENAME = "rename it"
    BROADCAST = "send the decision"
    END = "end"


@dataclass(frozen=True, slots=True)
class Wrote:
    """This rank's own part is durable."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank's own part, or rank 0's preparation or rename, has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportStored:
    """This rank's report is stored."""


@dataclass(frozen=True, slots=True)
class ReportArrived:
    """A rank's report: the reason why its part failed, or None."""

    rank: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class ReadyToRename:
    """The checkpoint is prepared; only the rename is missing."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The checkpoint exists."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The decision was sent, or the store is gone: it stays decided either way."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Rank 0's decision: the reason why it aborted, or None for a commit."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class Silence:
    """A message will not come: it timed out, the store is gone, or another rank ends the run."""

    why: str


@dataclass(frozen=True, slots=True)
class FoundCommitted:
    """The checkpoint of this attempt is there."""


@dataclass(frozen=True, slots=True)
class FoundNothing:
    """The checkpoint of this attempt is not there."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The main thread aborts the attempt: it timed out, the disk stalls, or a signal leaves no time."""

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
    """The state of an attempt on a rank.

    Args:
        missing: on rank 0, the ranks whose report is not in.
        problem: the first reason why it cannot become a checkpoint.
        outcome: set once it is decided, on rank 0 before the broadcast.
    """

    rank: int
    missing: frozenset[int]
    stage: CommitStage = CommitStage.WRITING
    problem: str | None = None
    outcome: Outcome | None = None

    @staticmethod
    def of(rank: int, world_size: int) -> CommitState:
        """Return the state at the start."""
        return CommitState(rank, frozenset(range(1, world_size)) if rank == 0 else frozenset())


def advance(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    """Return the state after an event, and the next action.

    Invariant: RENAME comes once at most, only after every rank has reported its part as written, and never after a
    decision to abort: a rank that aborts before that moment ends the attempt, one that aborts later changes nothing.
    An event that does not belong to the stage, repeated or late, changes nothing either.
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
    action = Action.BROADCAST if state.rank == 0 else Action.REPORT
    return replace(state, stage=CommitStage.ENDED, problem=state.problem or why, outcome=Outcome.FAILED), action


_BEFORE_RENAME = {CommitStage.WRITING, CommitStage.COLLECTING, CommitStage.PREPARING}


def _advance_rank0(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Wrote():
            return _collected(replace(state, stage=CommitStage.COLLECTING))
        case CommitStage.WRITING, Failed(why):  # the others' reports are still collected
            return _collected(replace(state, stage=CommitStage.COLLECTING, problem=why))
        case CommitStage.COLLECTING, ReportArrived(rank, problem) if rank in state.missing:
            named = None if problem is None else f"Rank {rank}: {problem}"
            return _collected(replace(state, missing=state.missing - {rank}, problem=state.problem or named))
        case ((CommitStage.COLLECTING | CommitStage.PREPARING | CommitStage.RENAMING), (Silence(why) | Failed(why))):
            return _failed(replace(state, problem=state.problem or why))
        case CommitStage.PREPARING, ReadyToRename():
            return replace(state, stage=CommitStage.RENAMING), Action.RENAME
        case CommitStage.RENAMING, Renamed():
            return replace(state, stage=CommitStage.BROADCASTING, outcome=Outcome.COMMITTED), Action.BROADCAST
        case CommitStage.BROADCASTING, (Broadcast() | Silence()):
            return replace(state, stage=CommitStage.ENDED), Action.END
    return state, Action.NOTHING


def _collected(state: CommitState) -> tuple[CommitState, Action]:
    """Go on once all reports are in."""
    if state.missing:
        return state, Action.COLLECT
    if state.problem is not None:
        return _failed(state)
    return replace(state, stage=CommitStage.PREPARING), Action.PREPARE


def _failed(state: CommitState) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.BROADCASTING, outcome=Outcome.FAILED), Action.BROADCAST


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
