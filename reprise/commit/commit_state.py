"""Decides one rank's next step in a two-phase commit: an event in, an action out, no side effects.

`protocol.py` carries out the actions and reports their results as events.
"""

from __future__ import annotations

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
    """The next action. Once done, it is an event itself, unless it has a result. NOTHING: another thread acts.

    COLLECT and AWAIT_LEADERS are done once every other rank, or leader, has succeeded.
    """

    NOTHING = "nothing"
    WRITE = "write its own part"
    REPORT = "store the report"
    AWAIT_DECISION = "wait for the decision"
    LOOK = "look whether the checkpoint is there; done if it is"
    COLLECT = "wait for the reports"
    PREPARE = "prepare the checkpoint"
    ANSWER = "tell rank 0 whether this host's folder is prepared"
    AWAIT_LEADERS = "wait for the answers of the other hosts"
    RENAME = "rename it"
    BROADCAST = "send the decision; done also where the store is gone: it stays decided"
    END = "end"


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank's part failed, or its preparation, rename or look. On rank 0 also: another rank has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class AskedToPrepare:
    """Rank 0 asks another host's leader to prepare its folder."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Rank 0's decision: the reason why it aborted, or None for a commit."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class Silence:
    """A message will not come: it timed out, the store is gone, or another rank ends the run."""

    why: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """The main thread aborts the attempt: it timed out, the disk stalls, or a signal leaves no time."""

    why: str


Event = Action | Failed | AskedToPrepare | Decision | Silence | Aborted


@dataclass(frozen=True, slots=True)
class CommitState:
    """An attempt's state on a rank.

    Args:
        leads: Whether this rank leads a host with its own folder.
        coordinates: Whether this rank decides. It is rank 0, unless a process group names another.
        problem: The first reason why it cannot become a checkpoint.
        outcome: Set when decided; on rank 0 before the broadcast.
    """

    leads: bool = False
    coordinates: bool = False
    stage: CommitStage = CommitStage.WRITING
    problem: str | None = None
    outcome: Outcome | None = None


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


def _advance_rank0(state: CommitState, event: Event) -> tuple[CommitState, Action]:
    match state.stage, event:
        case CommitStage.WRITING, Action.WRITE:
            return replace(state, stage=CommitStage.COLLECTING), Action.COLLECT
        case CommitStage.WRITING, Silence(why):  # a rank did not offer its part
            return _failed(state, why)
        case CommitStage.WRITING, Failed(why):  # the others' reports are still collected
            return replace(state, stage=CommitStage.COLLECTING, problem=why), Action.COLLECT
        case CommitStage.COLLECTING, Action.COLLECT if state.problem is None:
            return replace(state, stage=CommitStage.PREPARING), Action.PREPARE
        case CommitStage.COLLECTING, Action.COLLECT:
            return _failed(state, None)
        case CommitStage.PREPARING, Action.PREPARE:
            return replace(state, stage=CommitStage.AWAITING_LEADERS), Action.AWAIT_LEADERS
        case CommitStage.AWAITING_LEADERS, Action.AWAIT_LEADERS:
            return replace(state, stage=CommitStage.RENAMING), Action.RENAME
        case CommitStage.RENAMING, Action.RENAME:
            return replace(state, stage=CommitStage.BROADCASTING, outcome=Outcome.COMMITTED), Action.BROADCAST
        case CommitStage.BROADCASTING, (Action.BROADCAST | Silence() | Failed()):
            return replace(state, stage=CommitStage.ENDED), Action.END
        case _, (Silence(why) | Failed(why)):
            return _failed(state, why)
    return state, Action.NOTHING


def _failed(state: CommitState, why: str | None) -> tuple[CommitState, Action]:
    problem = state.problem or why
    return replace(state, stage=CommitStage.BROADCASTING, problem=problem, outcome=Outcome.FAILED), Action.BROADCAST


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
        case CommitStage.AWAITING, Decision(None):
            return _ended(state, Outcome.COMMITTED if state.problem is None else Outcome.FAILED)
        case CommitStage.AWAITING, Decision(str(why)):
            return _ended(replace(state, problem=state.problem or why), Outcome.FAILED)
        case CommitStage.LOOKING, Action.LOOK:
            return _ended(replace(state, problem=None), Outcome.COMMITTED)
        case CommitStage.LOOKING, Failed():
            return _ended(state, Outcome.UNKNOWN)
    return state, Action.NOTHING


def _ended(state: CommitState, outcome: Outcome) -> tuple[CommitState, Action]:
    return replace(state, stage=CommitStage.ENDED, outcome=outcome), Action.END
