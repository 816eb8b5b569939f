"""Decides one rank's next step in a two-phase commit: an event in, an action out, no side effects.

`protocol.py` carries out the actions and reports their results as events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class CommitStage(Enum):
    """A rank's stage. Rank 0, the coordinator, passes through COLLECTING, the others through REPORTING; all may skip.

    Where each host has its own folder, the other hosts' leaders also pass through PREPARING to RENAMING.
    """

    WRITING = "writing its own part"
    REPORTING = "storing its report"
    AWAITING = "waiting for the decision"
    LOOKING = "looking for the checkpoint, as no decision came"
    COLLECTING = "waiting for the others' reports"
    PREPARING = "writing all that the rename needs"
    PREPARED = "prepared, with a rename that only rank 0 may decide"
    AWAITING_LEADERS = "waiting for the other hosts' folders"
    RENAMING = "renaming: too late to abort"
    BROADCASTING = "sending the decision"
    ENDED = "ended"


class Outcome(Enum):
    """An attempt's outcome on a rank. UNKNOWN: in doubt; it may be committed, or still become so."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Action(Enum):
    """The next action. Once done, it is an event itself, unless it has a result. NOTHING: another thread acts."""

    NOTHING = "nothing"
    WRITE = "write its own part"
    REPORT = "store the report"
    AWAIT_DECISION = "wait for the decision"
    LOOK = "look whether the checkpoint is there"
    COLLECT = "wait for the reports"
    PREPARE = "prepare the checkpoint"
    ANSWER = "tell rank 0 whether this host's folder is prepared"
    AWAIT_LEADERS = "wait for the answers of the other hosts"
    RENAME = "rename it"
    BROADCAST = "send the decision; done also where the store is gone: it stays decided"
    END = "end"


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank's part failed, or rank 0's preparation or rename."""

    why: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """Reports from some ranks, or answers from leaders: the first failure's reason, or None."""

    ranks: frozenset[int]
    problem: str | None


@dataclass(frozen=True, slots=True)
class AskedToPrepare:
    """Rank 0 asks another host's leader to prepare its folder."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Rank 0's decision: the reason why it aborted, or None for a commit.

    Args:
        is_earlier: Whether an earlier attempt made the checkpoint. Rank 0 has then read no report on this attempt.
    """

    problem: str | None
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class Silence:
    """A message will not come: it timed out, the store is gone, or another rank ends the run."""

    why: str


@dataclass(frozen=True, slots=True)
class Looked:
    """Whether this attempt's checkpoint is there."""

    is_there: bool


@dataclass(frozen=True, slots=True)
class Aborted:
    """The main thread aborts the attempt: it timed out, the disk stalls, or a signal leaves no time."""

    why: str


Event = Action | Failed | Arrived | AskedToPrepare | Decision | Silence | Looked | Aborted


@dataclass(frozen=True, slots=True)
class CommitState:
    """An attempt's state on a rank.

    Args:
        missing: On rank 0, the ranks with an outstanding report.
        unprepared: On rank 0, the other hosts' leaders with an outstanding answer.
        leads: Whether this rank leads a host other than rank 0's, with its own folder.
        coordinates: Whether this rank decides. It is rank 0, unless a process group names another.
        problem: The first reason why it cannot become a checkpoint.
        outcome: Set when decided; on rank 0 before the broadcast.
        is_earlier: Whether an earlier attempt made a committed attempt's checkpoint.
    """

    rank: int
    missing: frozenset[int]
    unprepared: frozenset[int] = frozenset()
    leads: bool = False
    coordinates: bool = False
    stage: CommitStage = CommitStage.WRITING
    problem: str | None = None
    outcome: Outcome | None = None
    is_earlier: bool = False

    @property
    def made_checkpoint(self) -> bool:
        """Return whether this attempt made the checkpoint, so that rank 0 has read all ranks' reports."""
        return self.outcome is Outcome.COMMITTED and not self.is_earlier

    @staticmethod
    def of(rank: int, ranks: Sequence[int], leaders: Sequence[int] = ()) -> CommitState:
        """Return the initial state.

        Args:
            ranks: All ranks, the coordinator first.
            leaders: The leader of each host with its own folder. The coordinator alone for a shared folder.
        """
        if rank != ranks[0]:
            return CommitState(rank, frozenset(), leads=rank in leaders)
        other_ranks, leaders_of_others = frozenset(ranks[1:]), frozenset(leaders) - {rank}
        return CommitState(rank, other_ranks, leaders_of_others, coordinates=True)


def advance(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    """Return the state after an event, and the next action.

    Invariant: RENAME comes at most once, only after every rank has reported its part as written, and never after a
    decision to abort. If a rank aborts before then, the attempt ends; a later abort changes nothing. Where hosts have
    their own folders, no folder is renamed before all are prepared, and rank 0's comes first: a prepared folder is as
    good as renamed once another host has committed its attempt. An event for another stage, repeated or late, changes
    nothing.
    """
    if isinstance(event, Aborted):
        return _aborted(state, event.why)
    if state.stage is CommitStage.ENDED:
        return state, Action.END
    return _advance_rank0(state, event) if state.coordinates else _advance_other(state, event)


def _aborted(state: CommitState, why: str) -> tuple[CommitState, Action]:
    is_open = _BEFORE_RENAME if state.coordinates else {CommitStage.WRITING}
    if state.stage not in is_open:
        return state, Action.NOTHING
    action = Action.BROADCAST if state.coordinates else Action.REPORT
    return replace(state, stage=CommitStage.ENDED, problem=state.problem or why, outcome=Outcome.FAILED), action


_BEFORE_RENAME = {
    CommitStage.WRITING,
    CommitStage.COLLECTING,
    CommitStage.PREPARING,
    CommitStage.AWAITING_LEADERS,
}
_UNDECIDED = (
    CommitStage.COLLECTING,
    CommitStage.PREPARING,
    CommitStage.AWAITING_LEADERS,
    CommitStage.RENAMING,
)


def _advance_rank0(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Action.WRITE:
            return _collected(replace(state, stage=CommitStage.COLLECTING))
        case CommitStage.WRITING, Silence(why):  # a rank did not offer its part
            return _failed(replace(state, problem=state.problem or why))
        case CommitStage.WRITING, Failed(why):  # the others' reports are still collected
            return _collected(replace(state, stage=CommitStage.COLLECTING, problem=why))
        case CommitStage.COLLECTING, Arrived(ranks, problem) if ranks & state.missing:
            return _collected(replace(state, missing=state.missing - ranks, problem=state.problem or problem))
        case stage, (Silence(why) | Failed(why)) if stage in _UNDECIDED:
            return _failed(replace(state, problem=state.problem or why))
        case CommitStage.PREPARING, Action.PREPARE:
            return _answered(replace(state, stage=CommitStage.AWAITING_LEADERS))
        case CommitStage.AWAITING_LEADERS, Arrived(ranks, problem) if ranks & state.unprepared:
            return _answered(replace(state, unprepared=state.unprepared - ranks, problem=state.problem or problem))
        case CommitStage.RENAMING, Action.RENAME:
            return replace(state, stage=CommitStage.BROADCASTING, outcome=Outcome.COMMITTED), Action.BROADCAST
        case CommitStage.BROADCASTING, (Action.BROADCAST | Silence()):
            return replace(state, stage=CommitStage.ENDED), Action.END
    return state, Action.NOTHING


def _collected(state: CommitState) -> tuple[CommitState, Action]:
    """Proceed once all reports are in."""
    if state.missing:
        return state, Action.COLLECT
    if state.problem is not None:
        return _failed(state)
    return replace(state, stage=CommitStage.PREPARING), Action.PREPARE


def _answered(state: CommitState) -> tuple[CommitState, Action]:
    """Proceed once all folders are prepared."""
    if state.unprepared:
        return state, Action.AWAIT_LEADERS
    if state.problem is not None:
        return _failed(state)
    return replace(state, stage=CommitStage.RENAMING), Action.RENAME


def _failed(state: CommitState) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.BROADCASTING, outcome=Outcome.FAILED), Action.BROADCAST


_COMMITTED_EARLIER = "Rank 0's host has this iteration of an earlier attempt; the next start completes it on this one"
_WAITING = (CommitStage.REPORTING, CommitStage.AWAITING, CommitStage.PREPARED)


def _advance_other(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Action.WRITE:
            return replace(state, stage=CommitStage.REPORTING), Action.REPORT
        case CommitStage.WRITING, (Failed(why) | Silence(why)):
            return replace(state, stage=CommitStage.REPORTING, problem=why), Action.REPORT
        case CommitStage.REPORTING, Action.REPORT:
            return replace(state, stage=CommitStage.AWAITING), Action.AWAIT_DECISION
        case stage, Silence(why) if stage in _WAITING:
            if state.problem is not None:
                return _ended(state, Outcome.FAILED)
            return replace(state, stage=CommitStage.LOOKING, problem=why), Action.LOOK
        case CommitStage.AWAITING, AskedToPrepare() if state.leads and state.problem is None:
            return replace(state, stage=CommitStage.PREPARING), Action.PREPARE
        case CommitStage.PREPARING, Action.PREPARE:
            return replace(state, stage=CommitStage.PREPARED), Action.ANSWER
        case CommitStage.PREPARING, Failed(why):
            return replace(state, stage=CommitStage.PREPARED, problem=why), Action.ANSWER
        case CommitStage.PREPARED, Action.ANSWER:
            return state, Action.AWAIT_DECISION
        case CommitStage.PREPARED, Decision(None) if state.problem is None:
            return replace(state, stage=CommitStage.RENAMING), Action.RENAME
        case CommitStage.PREPARED, Decision(None):  # rank 0 cannot decide it: this folder stays as it is
            return _ended(state, Outcome.UNKNOWN)
        case CommitStage.PREPARED, Decision(why):
            return _ended(replace(state, problem=state.problem or why), Outcome.FAILED)
        case CommitStage.RENAMING, Action.RENAME:
            return _ended(state, Outcome.COMMITTED)
        case CommitStage.RENAMING, Failed(why):  # the other hosts have it; the next start renames this folder
            return _ended(replace(state, problem=why), Outcome.UNKNOWN)
        case CommitStage.AWAITING, Decision(None) if state.leads and state.problem is None:
            # An earlier attempt is committed. This host may have only its prepared folder, which must stay.
            return _ended(replace(state, problem=_COMMITTED_EARLIER), Outcome.UNKNOWN)
        case CommitStage.AWAITING, Decision(None, is_earlier):
            state = replace(state, is_earlier=is_earlier)
            return _ended(state, Outcome.COMMITTED if state.problem is None else Outcome.FAILED)
        case CommitStage.AWAITING, Decision(str(why)):
            return _ended(replace(state, problem=state.problem or why), Outcome.FAILED)
        case CommitStage.LOOKING, Looked(True):
            return _ended(replace(state, problem=None), Outcome.COMMITTED)
        case CommitStage.LOOKING, Looked(False):
            return _ended(state, Outcome.UNKNOWN)
    return state, Action.NOTHING


def _ended(state: CommitState, outcome: Outcome) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.ENDED, outcome=outcome), Action.END
