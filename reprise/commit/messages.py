"""The messages of an attempt: the opening, the decision, answers and aborts, and their deletion."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from reprise.commit import commit_state
from reprise.commit.attempt import Attempt, SharedCommitState, key_of
from reprise.commit.commit_state import Action, Outcome
from reprise.commit.report import Offer, RankReport
from reprise.errors import LaunchError, TrainerError
from reprise.format import manifest
from reprise.format.names import MANIFEST
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem

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
        copies: the order for the copies of local checkpoints.
        is_earlier: whether an earlier attempt made the checkpoint, and no report on this attempt is read.
    """

    iteration: int | None = None
    problem: str | None = None
    copies: str = ""
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class OpeningMessage(_Message):
    """Rank 0's answer to the offers of all ranks: they may write, unless a member says otherwise.

    Args:
        problem: why none may write.
        sides: the ranks whose replicas differ, which all ranks are about to learn; see `require_agreement`.
        is_decided: whether there is a decision on the attempt already.
    """

    problem: str | None = None
    sides: Sequence[Sequence[int]] = ()
    is_decided: bool = False


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
        broadcast(channel, key, DecisionMessage(problem=str(as_problem(error))))
        put_opening(channel, attempt.name, OpeningMessage(is_decided=True))
    if action is Action.REPORT:
        try:
            channel.put(f"{key}/report/{channel.rank}", RankReport(str(as_problem(error))).to_bytes())
            refuse_opening(channel, attempt, error)
        except LaunchError as lost:
            _log.error("the failure of %s could not be reported: %s", key, lost)
    return shared.current.outcome is Outcome.FAILED


def already_committed(channel: StoreChannel, name: str, iteration: int) -> None:
    """Decide attempt `name` without a save: rank 0 knows that `iteration` is committed. Rank 0 only."""
    broadcast(channel, key_of(name), DecisionMessage(iteration=iteration, is_earlier=True))
    put_opening(channel, name, OpeningMessage(is_decided=True))


def put_opening(channel: StoreChannel, name: str, message: OpeningMessage) -> None:
    """Send rank 0's last word on the opening of attempt `name`: an earlier one stands."""
    if channel.world_size == 1:
        return
    try:
        channel.put(f"{key_of(name)}/opened", message.to_bytes(), is_first=False)
    except LaunchError as error:
        _log.error("the opening of attempt %s could not be sent: %s", name, error)


def refuse_opening(channel: StoreChannel, attempt: Attempt, error: BaseException) -> None:
    """Tell the other ranks that this rank saves nothing, unless it has opened the attempt, or offered its part.

    Raises:
        LaunchError: on any rank but rank 0, if the store is gone.
    """
    if channel.coordinates:
        put_opening(channel, attempt.name, OpeningMessage(str(as_problem(error))))
        return
    offer = Offer(attempt.iteration, problem=str(as_problem(error)))
    channel.put(f"{key_of(attempt.name)}/offer/{channel.rank}", offer.to_bytes(), is_first=False)


def stripes_key(name: str, rank: int) -> str:
    """Return the key of a rank's message to its host on the columns of attempt `name`."""
    return f"{key_of(name)}/stripes/{rank}"


def delete_reports(channel: StoreChannel, attempt: Attempt) -> None:
    """Delete what this rank has sent on a committed attempt before the decision: every rank has read it.

    Raises:
        LaunchError: if the store is gone.
    """
    kinds = ["stripes"] if len(attempt.hosts.ranks_with(channel.rank)) > 1 else []
    kinds += [] if channel.coordinates else ["offer", "report"]
    kinds += ["prepared"] if channel.rank in attempt.hosts.leaders[1:] else []
    key = key_of(attempt.name)
    of_rank0 = [f"{key}/opened"] if channel.coordinates else []
    channel.delete([*of_rank0, *(f"{key}/{kind}/{channel.rank}" for kind in kinds)])


def delete_messages(channel: StoreChannel, name: str) -> None:
    """Delete all messages of this rank on attempt `name`, which every rank is past.

    Raises:
        LaunchError: if the store is gone.
    """
    key = key_of(name)
    kinds = ("offer", "report", "stripes", "prepared")
    of_rank0 = ("opened", "differs/decision", "decision", "files") if channel.coordinates else ()
    channel.delete([f"{key}/{kind}" for kind in (*of_rank0, *(f"{kind}/{channel.rank}" for kind in kinds))])


def broadcast(channel: StoreChannel, key: str, decision: DecisionMessage) -> None:
    """Send the decision to all ranks; where the store is gone, they look for the checkpoint: it stays decided."""
    if channel.world_size == 1:
        return
    try:
        channel.put(f"{key}/decision", decision.to_bytes())
    except LaunchError as error:
        _log.error("the decision on %s could not be sent: %s", key, error)


def is_committed(attempt: Attempt) -> bool:
    """Return whether the checkpoint that is there is this attempt's: the rename is the truth."""
    path = attempt.target / MANIFEST
    try:
        return manifest.from_bytes(attempt.folder.files.read_whole(path), where=path).attempt == attempt.name
    except (OSError, TrainerError):
        return False
