"""An attempt's messages: the opening, the decision, answers and aborts, and their deletion."""

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
    """A message with named values."""

    def to_bytes(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a message."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class DecisionMessage(_Message):
    """Rank 0's decision on an attempt.

    Args:
        iteration: The checkpoint's iteration. None without a checkpoint.
        problem: Why there is no checkpoint.
        copies: The order for copying local checkpoints.
        is_earlier: Whether an earlier attempt made the checkpoint, so that no report on this attempt is read.
    """

    iteration: int | None = None
    problem: str | None = None
    copies: str = ""
    is_earlier: bool = False


@dataclass(frozen=True, slots=True)
class OpeningMessage(_Message):
    """Rank 0's answer to all offers: the ranks may write, unless a member says otherwise.

    Args:
        problem: Why no rank may write.
        sides: The ranks with different replicas, which all ranks are about to learn; see `require_agreement`.
        is_decided: Whether the attempt is decided already.
    """

    problem: str | None = None
    sides: Sequence[Sequence[int]] = ()
    is_decided: bool = False


@dataclass(frozen=True, slots=True)
class Answer(_Message):
    """A leader's answer to the request to prepare its host's folder.

    Args:
        problem: Why the folder is not prepared.
        status: The local checkpoint copies' status.
    """

    problem: str | None
    status: str


def abort(channel: StoreChannel, attempt: Attempt, error: TrainerError, shared: SharedCommitState) -> bool:
    """Abort an attempt on behalf of a hung worker, and tell the other ranks.

    Returns:
        Whether it has failed for certain. If this rank has sent its report, or the rename has started, it is too late:
        the attempt is in doubt.
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
    """Send rank 0's final opening message for attempt `name`. An earlier message stands."""
    if channel.world_size == 1:
        return
    try:
        channel.put(f"{key_of(name)}/opened", message.to_bytes(), is_first=False)
    except LaunchError as error:
        _log.error("the opening of attempt %s could not be sent: %s", name, error)


def refuse_opening(channel: StoreChannel, attempt: Attempt, error: BaseException) -> None:
    """Tell the other ranks that this rank saves nothing, unless it has opened the attempt, or offered its part.

    Raises:
        LaunchError: The store is gone, on any rank but rank 0.
    """
    if channel.coordinates:
        put_opening(channel, attempt.name, OpeningMessage(str(as_problem(error))))
        return
    offer = Offer(attempt.iteration, problem=str(as_problem(error)))
    channel.put(f"{key_of(attempt.name)}/offer/{channel.rank}", offer.to_bytes(), is_first=False)


def stripes_key(name: str, rank: int) -> str:
    """Return the key for a rank's message to its host about columns in attempt `name`."""
    return f"{key_of(name)}/stripes/{rank}"


def delete_reports(channel: StoreChannel, attempt: Attempt) -> None:
    """Delete the messages that this rank sent before a commit decision: every rank has read them.

    Raises:
        LaunchError: The store is gone.
    """
    kinds = ["stripes"] if len(attempt.hosts.ranks_with(channel.rank)) > 1 else []
    kinds += [] if channel.coordinates else ["offer", "report"]
    kinds += ["prepared"] if channel.rank in attempt.hosts.leaders[1:] else []
    key = key_of(attempt.name)
    of_rank0 = [f"{key}/opened"] if channel.coordinates else []
    channel.delete([*of_rank0, *(f"{key}/{kind}/{channel.rank}" for kind in kinds)])


def delete_messages(channel: StoreChannel, name: str) -> None:
    """Delete all messages from this rank on attempt `name`, once every rank is past it.

    Raises:
        LaunchError: The store is gone.
    """
    key = key_of(name)
    kinds = ("offer", "report", "stripes", "prepared")
    of_rank0 = ("opened", "differs/decision", "decision", "files") if channel.coordinates else ()
    channel.delete([f"{key}/{kind}" for kind in (*of_rank0, *(f"{kind}/{channel.rank}" for kind in kinds))])


def broadcast(channel: StoreChannel, key: str, decision: DecisionMessage) -> None:
    """Send the decision to all ranks. If the store is gone, they look for the checkpoint: the decision stands."""
    if channel.world_size == 1:
        return
    try:
        channel.put(f"{key}/decision", decision.to_bytes())
    except LaunchError as error:
        _log.error("the decision on %s could not be sent: %s", key, error)


def is_committed(attempt: Attempt) -> bool:
    """Return whether the existing checkpoint comes from this attempt: the rename is the truth."""
    path = attempt.target / MANIFEST
    try:
        return manifest.from_bytes(attempt.folder.files.read_whole(path), where=path).attempt == attempt.name
    except (OSError, TrainerError):
        return False
