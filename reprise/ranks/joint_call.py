"""A joint call by all ranks on a channel: who has arrived, who cannot go on, and what they agree on.

The first decision stands, whichever rank makes it, and a late rank reads it: no rank waits for one that has raised,
makes another call, or never comes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch.distributed as dist

from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem, pack, unpack

_YES, _NO = "ok", "no"
_LAST = "reprise/last"  # each rank's last call


class JointCall:
    """A joint call by every rank on a channel. Each rank prepares it, offers its part, and learns the decision.

    `timeout_s` limits the wait for absent ranks. A rank in the call may prepare for as long as the
    channel's own timeout.

        with JointCall(channel, "save", "save(iteration=3)", timeout_s=120.0) as call:
            with call.preparing():
                part = prepare()
            offers = call.offer(part)
            answer = call.decide(choose(offers) if channel.coordinates else "")

    As a context on a channel of its own, whatever ends this rank's part ends the other ranks' waits. A class, not a
    generator: an interrupt in a generator's first line leaves it suspended, with its handlers unrun, for as long as the
    program refers to the interrupt.

    Args:
        key: Message key, new on this channel.
        name: The call as the user wrote it, with everything that must be equal on all ranks.
        check: Raises if this rank's arguments are invalid; then every rank raises.

    Attributes:
        nonce: A random name, equal on all ranks.
        is_agreed: Whether the ranks decided for the coordinator's data, so that the other ranks go on.
    """

    def __init__(
        self,
        channel: StoreChannel,
        key: str,
        name: str,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel, self.key, self.name, self.timeout_s, self._check = channel, key, name, timeout_s, check
        self.nonce = secrets.token_hex(4)
        self._is_decided, self.is_agreed = channel.world_size == 1, False

    def announce(self) -> None:
        """Tell the other ranks that this rank makes the call, and check its arguments.

        Raises:
            CheckpointError: A rank makes another call in its place. Every rank raises.
            TrainerError: `check` raised on a rank.
            LaunchError: The store is gone.
        """
        channel, name = self.channel, self.name
        if not self._is_decided:
            channel.publish(_LAST, f"{self._place}\n{name}")
            first, self.nonce, first_name = channel.settle(
                f"{self.key}/name", f"{channel.rank}\n{self.nonce}\n{name}"
            ).split("\n", 2)
            if first_name != name:
                self._decide(_NO + pack(_different_calls({int(first): first_name, channel.rank: name})))
        with self.preparing():
            self._check()

    def __enter__(self) -> JointCall:
        """Announce the call, and return it."""
        try:
            self.announce()
            return self  # an interrupt in this line, too, ends the waits
        except BaseException as error:
            end_waits(self.channel, error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report an error to the other ranks.

        Raises:
            CheckpointError: Replaces a LaunchError if another rank failed with its own error.
        """
        if error is None:
            return
        if isinstance(error, LaunchError):
            with contextlib.suppress(dist.DistError):
                if (failure := self.channel.failure()) is not None:
                    raise CheckpointError(failure.rstrip(".")) from error
        end_waits(self.channel, error)

    @property
    def is_out_of_step(self) -> bool:
        """Return whether other ranks may continue this call after an error on this rank alone."""
        return self.channel.world_size > 1 and (self.is_agreed or not self._is_decided)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Stop every rank, waiting or not, if this rank raises in this block."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(LaunchError):
                self.refuse(as_problem(error))
            raise

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Wait after this block until all ranks have left it. Raise on every rank if any rank raised."""
        with self.preparing():
            yield
        self.offer(b"")
        self.decide("")

    def refuse(self, problem: TrainerError) -> None:
        """Decide on failure, unless there is a decision already. Waits for no rank.

        Raises:
            LaunchError: The store is gone.
        """
        if not self._is_decided:
            self.channel.settle(self._decision, _NO + pack(problem, self.channel.rank))
            self._is_decided = True  # last: an interrupt before this leaves the call out of step

    def offer(self, data: bytes) -> list[bytes]:
        """Send `data` to the coordinator, which returns all ranks' data in the channel's rank order.

        The other ranks return an empty list at once.

        Raises:
            TrainerError: The decision by a rank unable to go on. A CheckpointError if a rank does not come.
            LaunchError: The store is gone.
        """
        channel = self.channel
        if not channel.coordinates:
            channel.send(f"{self.key}/offer", data)
            return []
        if channel.world_size > 1:
            keys = {rank: f"{self.key}/offer/{rank}" for rank in channel.ranks[1:]}
            self._await(
                lambda: channel.has(list(keys.values())), lambda: [r for r in keys if not channel.has([keys[r]])]
            )
            messages = channel.read_all(f"{self.key}/offer", channel.ranks[1:])
            channel.forget()
            return [data, *messages]
        return [data]

    def decide(self, data: str) -> str:
        """Return the coordinator's `data` on every rank, unless a rank could not go on.

        Raises:
            TrainerError: See `offer`.
            LaunchError: The store is gone.
        """
        if self.channel.world_size == 1:
            return data
        if self.channel.coordinates:
            return self._decide(_YES + data)
        self._await(lambda: False, lambda: [self.channel.coordinator])
        answer = self._decide("")
        self.channel.forget()  # the coordinator has read this rank's offer
        return answer

    @property
    def _decision(self) -> str:
        return f"{self.key}/decision"

    @property
    def _place(self) -> str:
        return self.channel.path_of(self.key)

    def _decide(self, decision: str) -> str:
        """Return `decision`, or the earlier decision if there is one."""
        decision = self.channel.settle(self._decision, decision)
        self.is_agreed = not decision.startswith(_NO)
        self._is_decided = True  # second: an interrupt between these two leaves the call out of step
        if self.is_agreed:
            return decision[len(_YES) :]
        raise unpack(decision[len(_NO) :])

    def _await(self, is_there: Callable[[], bool], absent: Callable[[], Sequence[int]]) -> None:
        """Wait for a message or a decision.

        Args:
            absent: Returns the awaited ranks.
        """
        channel = self.channel

        def is_over() -> bool:
            return is_there() or channel.has([self._decision])

        if not channel.wait_until(is_over, self.timeout_s):
            ranks = absent()
            calls = {rank: channel.published(_LAST, rank).partition("\n")[::2] for rank in ranks}
            if all(place == self._place for place, _ in calls.values()):  # preparing; the coordinator may be waiting
                if not channel.wait_until(is_over, channel.timeout_s):
                    self._decide(_NO + pack(self._unready(ranks)))
            else:
                late = {rank: name for rank, (place, name) in calls.items() if place != self._place}
                self._decide(_NO + pack(self._missing(late)))
        if not is_there() and channel.coordinates:
            self._decide("")

    def _missing(self, calls: dict[int, str]) -> CheckpointError:
        """Return the error for ranks absent from this call, given their last calls."""
        last = [f"rank {rank} last called {name}" if name else f"rank {rank} nothing" for rank, name in calls.items()]
        return CheckpointError(
            f"{_ranks(list(calls))} not called {self.name} within {self.timeout_s:g} s; {', '.join(last)}",
            fix="All ranks of a group must make the same calls in the same order. Check the logs of the missing "
            "ranks. If a rank is only slow, raise `timeout_s`.",
        )

    def _unready(self, ranks: Sequence[int]) -> CheckpointError:
        return CheckpointError(
            f"{_ranks(ranks)} called {self.name}, but did not become ready within {self.channel.timeout_s:g} s",
            fix="Check that rank's log: it may have died, or its disk may hang.",
        )


def end_waits(channel: StoreChannel, error: BaseException) -> None:
    """End the other ranks' waits for this rank. They learn about a `TrainerError` from the call's decision."""
    if channel.world_size > 1 and not isinstance(error, TrainerError):
        channel.fail(as_problem(error).what)


def _different_calls(calls: dict[int, str]) -> CheckpointError:
    return CheckpointError(
        "The ranks made different calls",
        expected="the same call on every rank, in the same order",
        found="; ".join(f"{name} on rank {rank}" for rank, name in sorted(calls.items())),
        fix="Nothing was read or written. Look for a rank that skipped a call or made an extra one.",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} have"
