"""How one rank decides on an attempt: events in, the next thing to do out. No message, file, thread or clock is here.

`protocol.py` does what is to be done and tells what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Stage(Enum):
    """What a rank is at. Ranks but 0 go by REPORTING, rank 0 goes by COLLECTING; either may skip to the end."""

    WRITING = "writing its own part"
    REPORTING = "handing in its report"
    AWAITING = "waiting for the verdict"
    LOOKING = "looking for the checkpoint, as no verdict came"
    COLLECTING = "waiting for the others' reports"
    PREPARING = "making all that the rename needs"
    RENAMING = "renaming: there is no way back"
    ANNOUNCING = "telling the verdict"
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
    AWAIT_VERDICT = "wait for the verdict"
    LOOK = "look whether the checkpoint is there"
    COLLECT = "wait for the reports"
    PUBLISH = "prepare the checkpoint"
    RENAME = "rename it"
    ANNOUNCE = "announce the verdict"
    END = "end"


@dataclass(frozen=True, slots=True)
class Wrote:
    """This rank's own part is durable."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank's own part, or rank 0's publishing, has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class Reported:
    """This rank's report hangs in the store."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank has handed in its report: why its part failed, or None."""

    rank: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Nothing is missing but the rename."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """The checkpoint exists."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The verdict is out, or cannot be told: either way nothing changes by it."""


@dataclass(frozen=True, slots=True)
class Verdict:
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
class Declined:
    """The main thread gives the attempt up: time is over, the disk stalls, or a signal leaves no time."""

    why: str


Event = (
    Wrote
    | Failed
    | Reported
    | Report
    | Prepared
    | Renamed
    | Announced
    | Verdict
    | Silence
    | FoundCommitted
    | FoundNothing
    | Declined
)


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank knows of an attempt.

    Args:
        missing: on rank 0, the ranks whose report is not in.
        problem: the first reason why it cannot become a checkpoint.
        outcome: set once it is decided, on rank 0 before it is announced.
    """

    rank: int
    missing: frozenset[int]
    stage: Stage = Stage.WRITING
    problem: str | None = None
    outcome: Outcome | None = None

    @staticmethod
    def of(rank: int, world_size: int) -> Ballot:
        """Return what a rank knows at the start."""
        return Ballot(rank, frozenset(range(1, world_size)) if rank == 0 else frozenset())


def advance(ballot: Ballot, event: Event) -> tuple[Ballot, Action]:
    """Return what a rank knows after an event, and what is to be done next.

    Invariant: RENAME is asked for once at most, only after every rank's part was reported whole, and never together
    with an announcement that it failed: a rank that declines before that moment ends the attempt, one that declines
    later changes nothing. An event that does not belong to the stage, repeated or late, changes nothing either.
    """
    if isinstance(event, Declined):
        return _declined(ballot, event.why)
    if ballot.stage is Stage.ENDED:
        return ballot, Action.END
    return _advance_rank0(ballot, event) if ballot.rank == 0 else _advance_other(ballot, event)


def _declined(ballot: Ballot, why: str) -> tuple[Ballot, Action]:
    is_open = _BEFORE_RENAME if ballot.rank == 0 else {Stage.WRITING}
    if ballot.stage not in is_open:
        return ballot, Action.NOTHING
    action = Action.ANNOUNCE if ballot.rank == 0 else Action.REPORT
    return replace(ballot, stage=Stage.ENDED, problem=ballot.problem or why, outcome=Outcome.FAILED), action


_BEFORE_RENAME = {Stage.WRITING, Stage.COLLECTING, Stage.PREPARING}


def _advance_rank0(ballot: Ballot, event: Event) -> tuple[Ballot, Action]:
    match ballot.stage, event:
        case Stage.WRITING, Wrote():
            return _collected(replace(ballot, stage=Stage.COLLECTING))
        case Stage.WRITING, Failed(why):  # the others' reports are still taken down
            return _collected(replace(ballot, stage=Stage.COLLECTING, problem=why))
        case Stage.COLLECTING, Report(rank, problem) if rank in ballot.missing:
            named = None if problem is None else f"Rank {rank}: {problem}"
            return _collected(replace(ballot, missing=ballot.missing - {rank}, problem=ballot.problem or named))
        case ((Stage.COLLECTING | Stage.PREPARING | Stage.RENAMING), (Silence(why) | Failed(why))):
            return _failed(replace(ballot, problem=ballot.problem or why))
        case Stage.PREPARING, Prepared():
            return replace(ballot, stage=Stage.RENAMING), Action.RENAME
        case Stage.RENAMING, Renamed():
            return replace(ballot, stage=Stage.ANNOUNCING, outcome=Outcome.COMMITTED), Action.ANNOUNCE
        case Stage.ANNOUNCING, (Announced() | Silence()):
            return replace(ballot, stage=Stage.ENDED), Action.END
    return ballot, Action.NOTHING


def _collected(ballot: Ballot) -> tuple[Ballot, Action]:
    """Go on once all reports are in."""
    if ballot.missing:
        return ballot, Action.COLLECT
    if ballot.problem is not None:
        return _failed(ballot)
    return replace(ballot, stage=Stage.PREPARING), Action.PUBLISH


def _failed(ballot: Ballot) -> tuple[Ballot, Action]:
    return replace(ballot, stage=Stage.ANNOUNCING, outcome=Outcome.FAILED), Action.ANNOUNCE


def _advance_other(ballot: Ballot, event: Event) -> tuple[Ballot, Action]:
    match ballot.stage, event:
        case Stage.WRITING, Wrote():
            return replace(ballot, stage=Stage.REPORTING), Action.REPORT
        case Stage.WRITING, Failed(why):
            return replace(ballot, stage=Stage.REPORTING, problem=why), Action.REPORT
        case Stage.REPORTING, Reported():
            return replace(ballot, stage=Stage.AWAITING), Action.AWAIT_VERDICT
        case ((Stage.REPORTING | Stage.AWAITING), Silence(why)):
            if ballot.problem is not None:
                return _ended(ballot, Outcome.FAILED)
            return replace(ballot, stage=Stage.LOOKING, problem=why), Action.LOOK
        case Stage.AWAITING, Verdict(None):
            return _ended(ballot, Outcome.COMMITTED if ballot.problem is None else Outcome.FAILED)
        case Stage.AWAITING, Verdict(str(why)):
            return _ended(replace(ballot, problem=ballot.problem or why), Outcome.FAILED)
        case Stage.LOOKING, FoundCommitted():
            return _ended(replace(ballot, problem=None), Outcome.COMMITTED)
        case Stage.LOOKING, FoundNothing():
            return _ended(ballot, Outcome.UNKNOWN)
    return ballot, Action.NOTHING


def _ended(ballot: Ballot, outcome: Outcome) -> tuple[Ballot, Action]:
    return replace(ballot, stage=Stage.ENDED, outcome=outcome), Action.END
