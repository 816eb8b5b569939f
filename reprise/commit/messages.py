"""The messages of an attempt beside its two-phase commit: marks, aborts, and their deletion."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from reprise.commit import commit_state, disagreement
from reprise.commit.attempt import Attempt, SharedCommitState, key_of
from reprise.commit.channel import StoreChannel
from reprise.commit.commit_state import Action, Outcome
from reprise.errors import LaunchError, TrainerError
from reprise.format import manifest
from reprise.format.names import MANIFEST
from reprise.format.report import RankReport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of named values."""

    def to_bytes(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the content of a message."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class DecisionMessage(_Message):
    """Rank 0's decision on an attempt.

    Args:
        iteration: that of the checkpoint, if there is one.
        problem: why there is none.
        witnesses: the ranks that send their tables before the last decision comes; None in a last decision.
        copies: the order for the copies of local checkpoints.
        is_earlier: whether an earlier attempt made the checkpoint, and no report on this attempt is read.
    """

    iteration: int | None = None
    problem: str | None = None
    witnesses: Sequence[int] | None = None
    copies: str = ""
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class Answer(_Message):
    """The answer of a host's leader to the request to prepare its folder.

    Args:
        problem: why the folder is not prepared.
        status: of the copies of local checkpoints.
    """

    problem: str | None
    status: str


def abort(channel: StoreChannel, attempt: Attempt, error: TrainerError, shared: SharedCommitState) -> bool:
    """Abort an attempt in the place of the worker, which hangs, and let the other ranks know.

    Returns:
        Whether it has failed for certain. Where this rank's report is out, or the rename has begun, it is too late to
        abort: the attempt is in doubt.
    """
    action = shared.take(commit_state.Aborted(str(error)))
    key = key_of(attempt.name)
    if action is Action.BROADCAST:
        broadcast(channel, key, DecisionMessage(problem=text_of(error)))
    if action is Action.REPORT:
        report = RankReport(attempt.iteration, problem=text_of(error))
        try:
            channel.put(f"{key}/report/{channel.rank}", report.to_bytes())
        except LaunchError as lost:
            _log.error("the failure of %s could not be reported: %s", key, lost)
    return shared.current.outcome is Outcome.FAILED


def already_committed(channel: StoreChannel, name: str, iteration: int) -> None:
    """Decide attempt `name` without a save: rank 0 knows that `iteration` is committed. Rank 0 only."""
    broadcast(channel, key_of(name), DecisionMessage(iteration=iteration, is_earlier=True))


def broadcast_marked(channel: StoreChannel, attempt: Attempt, *, is_marked: bool) -> None:
    """Let the other ranks of a host know whether the mark of an attempt is in its folder. Their leader only."""
    channel.put(marked_key(attempt, channel.rank), json.dumps([attempt.iteration, is_marked]).encode())


def await_marked(channel: StoreChannel, attempt: Attempt, *, check: Callable[[], None]) -> bool:
    """Wait for the leader's message on the mark of an attempt, and return whether it is in its folder.

    Args:
        check: called again and again; ends the wait if it raises.

    Returns:
        False also if rank 0 has ended the attempt, as its decision says.

    Raises:
        LaunchError: if no message comes in time.
        CheckpointError: if the leader saves another iteration.
    """
    leader = attempt.hosts.leader_of(channel.rank)
    marked, sender = marked_key(attempt, leader), f"rank {leader}"
    if channel.await_any([marked, f"{key_of(attempt.name)}/decision"], sender=sender, check=check) != marked:
        return False
    iteration, is_marked = json.loads(channel.read(marked, sender=sender))
    disagreement.refuse_other_iterations({leader: iteration, channel.rank: attempt.iteration})
    return bool(is_marked)


def marked_key(attempt: Attempt, leader: int) -> str:
    """Return the key of a leader's message on the mark of an attempt."""
    return f"{key_of(attempt.name)}/marked/{leader}"


def stripes_key(name: str, rank: int) -> str:
    """Return the key of a rank's message to its host on the columns of attempt `name`."""
    return f"{key_of(name)}/stripes/{rank}"


def delete_reports(channel: StoreChannel, attempt: Attempt) -> None:
    """Delete what this rank has sent on a committed attempt before the decision: every rank has read it.

    Raises:
        LaunchError: if the store is gone.
    """
    kinds = ["stripes"] if len(attempt.hosts.ranks_with(channel.rank)) > 1 else []
    kinds += ["marked"] if channel.rank in attempt.hosts.leaders else []
    kinds += [] if channel.coordinates else ["report"]
    channel.delete([f"{key_of(attempt.name)}/{kind}/{channel.rank}" for kind in kinds])


def delete_messages(channel: StoreChannel, name: str) -> None:
    """Delete all messages of this rank on attempt `name`, which every rank is past.

    Raises:
        LaunchError: if the store is gone.
    """
    key = key_of(name)
    kinds = ("report", "table", "stripes", "marked", "prepared")
    of_decision = [f"{key}/decision", f"{key}/decision/last", f"{key}/files"] if channel.coordinates else []
    channel.delete([*of_decision, *(f"{key}/{kind}/{channel.rank}" for kind in kinds)])


def broadcast(channel: StoreChannel, key: str, decision: DecisionMessage) -> None:
    """Send the decision to all ranks; where the store is gone, they look for the checkpoint: it stays decided.

    A failure goes out twice: where ranks were asked for their tables, all wait for the last one.
    """
    if channel.world_size == 1:
        return
    try:
        is_failure = decision.problem is not None
        channel.put(f"{key}/decision", decision.to_bytes(), is_first=not is_failure)
        if is_failure:
            channel.put(f"{key}/decision/last", decision.to_bytes())
    except LaunchError as error:
        _log.error("the decision on %s could not be sent: %s", key, error)


def text_of(error: BaseException) -> str:
    """Return an error as the other ranks read it."""
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"


def is_committed(attempt: Attempt) -> bool:
    """Return whether the checkpoint that is there is this attempt's: the rename is the truth."""
    path = attempt.folder.iteration(attempt.iteration) / MANIFEST
    try:
        return manifest.from_bytes(attempt.folder.files.read_whole(path), where=path).attempt == attempt.name
    except (OSError, TrainerError):
        return False
