"""Decides one rank's next step in a two-phase commit: an event in, an action out, no side effects.

`protocol.py` carries out the actions and reports their results as events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Outcome(Enum):
    """An attempt's outcome on a rank. UNKNOWN: in doubt; it may be committed, or still become so."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Action(Enum):
    """What a rank does, or is to do next. Once done, it is an event itself, unless it has a result.

    Rank 0, the coordinator, alone has COLLECT, AWAIT_LEADERS and BROADCAST. The others have REPORT, AWAIT_DECISION and
    LOOK. Where each host has its own folder, the other hosts' leaders also PREPARE, ANSWER, AWAIT_ORDER and RENAME.

    COLLECT and AWAIT_LEADERS are done once every other rank, or leader, has succeeded. NOTHING: another thread acts.
    """

    NOTHING = "nothing"
    WRITE = "write its own part"
    REPORT = "store the report"
    AWAIT_DECISION = "wait for the decision, or the request to prepare"
    LOOK = "look whether the checkpoint is there, as no decision came; done if it is"
    COLLECT = "wait for the others' reports"
    PREPARE = "write all that the rename needs"
    ANSWER = "tell rank 0 whether this host's folder is prepared"
    AWAIT_ORDER = "wait for rank 0, which alone may decide the rename"
    AWAIT_LEADERS = "wait for the answers of the other hosts"
    RENAME = "rename: too late to abort"
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
        stage: What the rank is doing.
        problem: The first reason why it cannot become a checkpoint.
        outcome: Set when decided; on rank 0 before the broadcast.
    """

    leads: bool = False
    coordinates: bool = False
    stage: Action = Action.WRITE
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
    if state.stage is Action.END:
        return state, Action.END
    after = _advance_rank0(state, event) if state.coordinates else _advance_other(state, event)
    return after, Action.NOTHING if after is state else after.stage


def _aborted(state: CommitState, why: str) -> tuple[CommitState, Action]:
    if state.stage not in (_BEFORE_RENAME if state.coordinates else {Action.WRITE}):
        return state, Action.NOTHING
    return _ended(state, Outcome.FAILED, why), Action.BROADCAST if state.coordinates else Action.REPORT


_BEFORE_RENAME = {Action.WRITE, Action.COLLECT, Action.PREPARE, Action.AWAIT_LEADERS}
# What follows a success.
_NEXT_ON_RANK0 = {
    Action.WRITE: Action.COLLECT,
    Action.COLLECT: Action.PREPARE,
    Action.PREPARE: Action.AWAIT_LEADERS,
    Action.AWAIT_LEADERS: Action.RENAME,
}
_NEXT_ON_OTHERS = {
    Action.WRITE: Action.REPORT,
    Action.REPORT: Action.AWAIT_DECISION,
    Action.PREPARE: Action.ANSWER,
    Action.ANSWER: Action.AWAIT_ORDER,
}


def _advance_rank0(state: CommitState, event: Event) -> CommitState:
    match state.stage, event:
        case Action.BROADCAST, (Action.BROADCAST | Silence() | Failed()):
            return replace(state, stage=Action.END)
        case Action.WRITE, Failed(why):  # the others' reports are still collected
            return replace(state, stage=Action.COLLECT, problem=why)
        case Action.COLLECT, Action.COLLECT if state.problem is not None:
            return _failed(state, state.problem)
        case Action.RENAME, Action.RENAME:
            return replace(state, stage=Action.BROADCAST, outcome=Outcome.COMMITTED)
        case _, (Silence(why) | Failed(why)):  # while it writes: a rank did not offer its part
            return _failed(state, why)
        case stage, done if done is stage and stage in _NEXT_ON_RANK0:
            return replace(state, stage=_NEXT_ON_RANK0[stage])
    return state


def _failed(state: CommitState, why: str) -> CommitState:
    return replace(_ended(state, Outcome.FAILED, why), stage=Action.BROADCAST)


_COMMITTED_EARLIER = "Rank 0's host has this iteration of an earlier attempt; the next start completes it on this one"


def _advance_other(state: CommitState, event: Event) -> CommitState:
    is_good = state.problem is None
    match state.stage, event:
        case Action.WRITE, (Failed(why) | Silence(why)):
            return replace(state, stage=Action.REPORT, problem=why)
        case ((Action.REPORT | Action.AWAIT_DECISION | Action.ANSWER | Action.AWAIT_ORDER), Silence(why)):
            return replace(state, stage=Action.LOOK, problem=why) if is_good else _ended(state, Outcome.FAILED)
        case Action.AWAIT_DECISION, AskedToPrepare() if state.leads and is_good:
            return replace(state, stage=Action.PREPARE)
        case Action.PREPARE, Failed(why):
            return replace(state, stage=Action.ANSWER, problem=why)
        case ((Action.AWAIT_DECISION | Action.AWAIT_ORDER), Decision(str(why))):
            return _ended(state, Outcome.FAILED, why)
        case Action.AWAIT_ORDER, Decision(None):
            # With a problem, rank 0 cannot decide on it: this folder stays as it is.
            return replace(state, stage=Action.RENAME) if is_good else _ended(state, Outcome.UNKNOWN)
        case Action.AWAIT_DECISION, Decision(None) if state.leads and is_good:
            # An earlier attempt is committed. This host may have only its prepared folder, which must stay.
            return _ended(state, Outcome.UNKNOWN, _COMMITTED_EARLIER)
        case Action.AWAIT_DECISION, Decision(None):
            return _ended(state, Outcome.COMMITTED if is_good else Outcome.FAILED)
        case Action.RENAME, Action.RENAME:
            return _ended(state, Outcome.COMMITTED)
        case Action.RENAME, Failed(why):  # the other hosts have it; the next start renames this folder
            return _ended(state, Outcome.UNKNOWN, why)
        case Action.LOOK, Action.LOOK:
            return _ended(replace(state, problem=None), Outcome.COMMITTED)
        case Action.LOOK, Failed():
            return _ended(state, Outcome.UNKNOWN)
        case stage, done if done is stage and stage in _NEXT_ON_OTHERS:
            return replace(state, stage=_NEXT_ON_OTHERS[stage])
    return state


def _ended(state: CommitState, outcome: Outcome, why: str | None = None) -> CommitState:
    """Return the last state. An earlier problem stays."""
    return replace(state, stage=Action.END, problem=state.problem or why, outcome=outcome)
