"""An attempt on one rank, as its worker thread and its main thread share it: the commit state, and the messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from reprise.commit import commit_state
from reprise.commit.attempt import Hosts
from reprise.commit.commit_state import Action, CommitState, Event
from reprise.commit.messages import Message
from reprise.errors import LaunchError, TrainerError
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem

_log = logging.getLogger(__name__)


class SharedAttempt:
    """An attempt's commit state on this rank, and this rank's messages. Both threads send on the worker's channel.

    A run of a single rank sends no messages.

    Args:
        name: The attempt's name.

    Attributes:
        key: The prefix for all keys.
        left: By key, the names of this rank's messages in the store, on earlier attempts too, until `delete_read`.
    """

    def __init__(self, name: str, channel: StoreChannel, hosts: Hosts) -> None:
        self.key, self.left, self._channel = f"save/{name}", dict[str, list[str]](), channel
        coordinator, *self._followers = hosts.leaders
        self._state = CommitState(leads=channel.rank in self._followers, coordinates=channel.rank == coordinator)
        self._lock = threading.Lock()

    @property
    def current(self) -> CommitState:
        """Return the current state."""
        return self._state

    def take(self, event: Event) -> Action:
        """Advance by an event, one thread at a time, and return the next action."""
        with self._lock:
            self._state, action = commit_state.advance(self._state, event)
            return action

    def put(self, kind: str, message: Message, *, is_first: bool = True) -> None:
        """Send this rank's message of a kind; see `StoreChannel.put`.

        Raises:
            LaunchError: The store does not hold it.
        """
        if self._channel.world_size > 1:
            key = f"{self.key}/{kind}"
            self.left[key] = self._channel.put(key, message.to_bytes(), is_first=is_first)

    def read(self, kind: str, rank: int) -> Message:
        """Wait for a rank's message of a kind, and return it.

        Raises:
            LaunchError: It does not come.
        """
        return self.read_all(kind, [rank])[rank]

    def read_all(self, kind: str, ranks: Sequence[int]) -> dict[int, Message]:
        """Return messages of a kind by rank; see `read`. Each rank deletes its own after the attempt."""
        messages = self._channel.read_all(f"{self.key}/{kind}", ranks)
        return dict(zip(ranks, map(Message.from_bytes, messages), strict=True))

    def post(self, kind: str, message: Message) -> None:
        """Send a message that changes nothing decided. If the store is gone, log it. An earlier message stands."""
        if f"{self.key}/{kind}" in self.left:  # sent; if the other thread is sending it, the store keeps the first
            return
        try:
            self.put(kind, message, is_first=False)
        except LaunchError as error:
            _log.error("%s/%s could not be sent: %s", self.key, kind, error)

    def decide(self, decision: Message) -> None:
        """Send the decision, and end all waits for rank 0's earlier messages. Rank 0 only."""
        self.post("decision", decision)
        self.post("opened", Message())
        if self._followers:
            self.post("files", Message())

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that this rank saves nothing, unless it has opened the attempt, or offered its part."""
        problem = str(as_problem(error))
        if self._state.coordinates:
            self.post("opened", Message(problem=problem))
        else:
            self.post("offer", Message(problem=problem))

    def abort(self, error: TrainerError) -> None:
        """Abort the attempt on behalf of a hung worker, and tell the other ranks.

        If this rank has sent its report, or the rename has started, it is too late: the attempt is in doubt.
        """
        action = self.take(commit_state.Aborted(str(error)))
        if action is Action.BROADCAST:
            self.decide(Message(problem=str(error)))
        if action is Action.REPORT:
            self.post("report", Message(problem=str(error)))
            self.refuse(error)

    def delete_read(self) -> None:
        """Delete this rank's messages, except the decision: once an attempt is committed, every rank has read them.

        Earlier attempts' messages are deleted too. By now every rank has finished or aborted those attempts.

        Raises:
            LaunchError: The store is gone.
        """
        for key in [*self.left]:  # a copy, since the other thread may send
            if key != f"{self.key}/decision":
                self._channel.delete(self.left.pop(key))
