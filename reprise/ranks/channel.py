"""Messages between ranks over a key-value store: saves and loads need no collective, and any thread may send.

A store serves one call at a time per connection. So a channel never waits in a call: it asks again and again, and a
process needs a single connection for all its channels.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from reprise.errors import LaunchError, TrainerError
from reprise.ranks.error_message import as_problem, pack, unpack

# A TCPStore resets the connection on values over 8 MiB.
MESSAGE_BYTES = 4 << 20
# A message up to this size is its key's value. A longer one is split into chunks, and the value is their count.
SMALL_BYTES = 64 << 10
_SMALL = b"="
_FAILED = "failed"
_EXIT_GRACE_S = 5.0
_BATCH = 256  # messages read per call, which holds the GIL while it copies them

# By store, the connection for its new channels: a new one costs milliseconds, and other code waits in the store's own.
_connections = weakref.WeakKeyDictionary[Store, Store]()


class StoreChannel:
    """Messages by key between all ranks in a run.

    Args:
        store: Holds the messages. With several ranks, its channels have a connection of their own.
        rank: This rank.
        world_size: The channel's rank count.
        timeout_s: Seconds to wait for a peer's message.
        ranks: The global ranks, the coordinator first. Default: all from 0. Below, rank 0 means the coordinator.
        prefix: Prefix for all keys, because several channels share a store.

    Any thread may call any method. All ranks call `gather`, `broadcast`, `agree` and the methods built on them in the
    same order, on a channel or its clones, and on one thread per channel.

    A message lies under its key and its sender's rank, and its sender deletes it. `gather` deletes rank 0's earlier
    broadcasts: a rank in the gather is past them. `broadcast` deletes a rank's messages to an earlier `gather`: rank 0
    is past it. A message sent by `put` stays until `delete`: see `SharedAttempt.delete_read` for saves.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        world_size: int,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        prefix: str = "",
    ) -> None:
        self._source, self._prefix = store, prefix  # kept, because the store may be in this process
        if world_size > 1 and store not in _connections:
            _connections[store] = store.clone()  # type: ignore[attr-defined]
        self._connection = _connections.get(store, store)
        self._store = PrefixStore(prefix, self._connection) if prefix else self._connection
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        # What `forget` deletes: rank 0's broadcasts and settled texts, other ranks' messages to a `gather`.
        self._sent: list[str] = []

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        """Return a channel to the same ranks for another thread, or with another timeout."""
        channel = copy.copy(self)
        channel.timeout_s = self.timeout_s if timeout_s is None else timeout_s
        channel._sent = []
        return channel

    @property
    def coordinator(self) -> int:
        """Return the deciding rank."""
        return self.ranks[0]

    @property
    def coordinates(self) -> bool:
        """Return whether this rank is the coordinator."""
        return self.rank == self.coordinator

    def store(self, prefix: str, timeout_s: float) -> Store:
        """Return the store below a prefix with its own connection, for a process group other than the run's."""
        connection = self._connection.clone()  # type: ignore[attr-defined]
        connection.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(self.path_of(prefix), connection)

    def path_of(self, key: str) -> str:
        """Return a channel key's full name in the store."""
        return f"{self._prefix}/{key}"

    def put(self, key: str, data: bytes, *, is_first: bool = True) -> list[str]:
        """Store `data` as this rank's message, and check the store: `set` on a dead host returns normally.

        Args:
            is_first: Whether an earlier message under the key is an error. If not, the earlier message stays.

        Returns:
            The names under which the store holds it, for `delete`.

        Raises:
            LaunchError: The store does not hold it.
        """
        key, value = f"{key}/{self.rank}", _SMALL + data
        with self._reaching(key):
            if len(data) > SMALL_BYTES:
                chunks = [data[at : at + MESSAGE_BYTES] for at in range(0, len(data), MESSAGE_BYTES)]
                value = b"%d" % len(chunks)
                for name, chunk in zip(_chunks(key, value), chunks, strict=True):
                    self._store.set(name, chunk)  # type: ignore[arg-type]
            echo = self._store.compare_set(key, "", value)  # type: ignore[arg-type]
        if echo != value and (is_first or not echo):
            raise self._lost(key, None)
        return [key, *_chunks(key, value)]

    def send(self, key: str, data: bytes) -> None:
        """Put a message that its readers have read before rank 0's next broadcast, and delete it after that.

        Raises:
            LaunchError: See `put`.
        """
        self._sent += self.put(key, data)

    def publish(self, name: str, text: str) -> None:
        """Store this rank's latest text under a name, for ranks on any channel of this store.

        Raises:
            LaunchError: The store is gone.
        """
        key = f"{name}/{self.rank}"
        with self._reaching(key):
            self._connection.set(key, text)

    def published(self, name: str, rank: int) -> str:
        """Return a rank's latest text under a name, or an empty text if it published none.

        Raises:
            LaunchError: The store is gone.
        """
        key = f"{name}/{rank}"
        with self._reaching(key):
            return bytes(self._connection.get(key)).decode() if self._connection.check([key]) else ""

    def read_all(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        """Wait for these ranks' messages under a key and return their data in order, with few store calls.

        Raises:
            LaunchError: Some are missing after `timeout_s`. Names the first missing rank.
        """
        keys, data = [f"{key}/{rank}" for rank in ranks], list[bytes]()
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            try:
                if not self._await(batch, self.timeout_s, watch=True):
                    raise dist.DistStoreError("nothing came")
                for name, value in zip(batch, map(bytes, self._store.multi_get(batch)), strict=True):
                    parts = [self._store.get(chunk) for chunk in _chunks(name, value)]
                    data.append(b"".join(parts) if parts else value[len(_SMALL) :])
            except dist.DistError as error:
                _connections.pop(self._source, None)
                silent = batch[0]
                with contextlib.suppress(dist.DistError):  # the store may be gone
                    silent = next((name for name in batch if not self._store.check([name])), silent)
                raise self._silent(silent, error) from error
        return data

    def delete(self, names: Sequence[str]) -> None:
        """Delete what the store holds under these names. No rank reads it any more. Some may be deleted already.

        Raises:
            LaunchError: The store is gone.
        """
        for name in names:
            with self._reaching(name):
                self._store.delete_key(name)

    def settle(self, key: str, text: str) -> str:
        """Store `text` under `key` unless another rank was first. Return the stored text.

        A long text is its rank's message under the key, and the key's value is the rank. Another rank than 0 cannot
        tell when all have read its long text, which stays.

        Raises:
            LaunchError: The store is gone.
        """
        names, data = [key], text.encode()
        value = _SMALL + data
        if len(data) > SMALL_BYTES:
            names += self.put(key, data)
            value = b"%d" % self.rank
        if self.coordinates:
            self._sent += names
        with self._reaching(key):
            first = bytes(self._store.compare_set(key, "", value))  # type: ignore[arg-type]
        if first == value:
            return text
        if first.startswith(_SMALL):
            return first[len(_SMALL) :].decode()
        (data,) = self.read_all(key, [int(first)])
        return data.decode()

    def forget(self) -> None:
        """Delete this rank's messages that the other ranks have read.

        Raises:
            LaunchError: The store is gone.
        """
        self.delete(self._sent)
        self._sent.clear()

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys are stored.

        Raises:
            LaunchError: The store is gone.
        """
        with self._reaching(keys[0]):
            return bool(self._store.check(list(keys)))

    def wait_until(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_there` returns True, and return whether it did in time.

        Raises:
            LaunchError: A rank fails meanwhile, or the store is gone.
        """
        with self._reaching("any"):
            return self._poll(is_there, timeout_s, watch=True)

    def gather(self, key: str, data: bytes) -> list[bytes]:
        """Send `data` to rank 0. Return all ranks' data there, ordered like `ranks`, and an empty list elsewhere."""
        if not self.coordinates:
            self.send(key, data)
            return []
        messages = self.read_all(key, self.ranks[1:])
        self.forget()
        return [data, *messages]

    def broadcast(self, key: str, data: bytes | None) -> bytes:
        """Return rank 0's `data` on every rank."""
        if not self.coordinates:
            (data,) = self.read_all(key, self.ranks[:1])
            self.forget()
            return data
        assert data is not None
        if self.world_size > 1:
            self.send(key, data)
        return data

    def agree(self, key: str, problem: TrainerError | None) -> None:
        """Return on every rank if no rank has a problem; else raise on all.

        Raises:
            TrainerError: This rank's `problem`, or another rank's first. A DataError, MismatchError, LockError,
                LaunchError or UnreadableError keeps its class, any other becomes a CheckpointError.
        """
        self.join(key, None, lambda _: None, problem=problem)

    @contextlib.contextmanager
    def agreed(self, key: str) -> Iterator[None]:
        """Agree after this block: if it raised on any rank, every rank raises; see `agree`."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(TrainerError):  # this rank's error, as the others read it
                self.agree(key, as_problem(error))
            raise
        self.agree(key, None)

    def from_first(self, key: str, make: Callable[[], Any]) -> Any:
        """Return rank 0's result on every rank, with a single message.

        Args:
            key: Message key, new on this channel.
            make: Called on rank 0 alone. Its result travels as JSON, so all ranks get equal types.

        Raises:
            TrainerError: `make` raised. Every rank raises, with the classes in `agree`.
        """
        return self._answered(key, lambda: {"value": make()})

    def join(
        self, key: str, part: Any, join_all: Callable[[list[Any]], Any], *, problem: TrainerError | None = None
    ) -> Any:
        """Return rank 0's result from all ranks' parts on every rank, with a message from each rank and an answer.

        Args:
            key: Message key, new on this channel.
            part: This rank's part. Parts and result travel as JSON.
            join_all: Called on rank 0 alone with the parts, ordered like `ranks`.
            problem: This rank's problem, if it has no part.

        Raises:
            TrainerError: A rank has a problem, see `agree`; or `join_all` raised, see `from_first`.
        """
        message = {"value": part} if problem is None else {"problem": pack(problem, self.rank)}
        messages = [json.loads(data) for data in self.gather(f"{key}/part", json.dumps(message).encode())]

        def answer() -> dict[str, Any]:
            problems = [message for message in messages if "problem" in message]
            return problems[0] if problems else {"value": join_all([message["value"] for message in messages])}

        return self._answered(f"{key}/joint", answer, problem)

    def _answered(self, key: str, answer: Callable[[], dict[str, Any]], problem: TrainerError | None = None) -> Any:
        """Return the value in rank 0's answer on every rank. If that has a problem, raise this rank's own, or that."""
        data: bytes | None = None
        if self.coordinates:
            try:
                data = json.dumps(answer()).encode()
            except BaseException as error:
                with contextlib.suppress(LaunchError):
                    self.broadcast(key, json.dumps({"problem": pack(as_problem(error), self.rank)}).encode())
                if isinstance(error, TrainerError):
                    error.is_known_to_all = True
                raise
        answered = json.loads(self.broadcast(key, data))
        if "problem" in answered:
            raised = problem or unpack(answered["problem"])
            raised.is_known_to_all = True
            raise raised
        return answered["value"]

    def fail(self, text: str) -> str | None:
        """Report this rank's failure to every rank, which ends their waits for its messages. The first report counts.

        Returns:
            Another rank's earlier report, or None if this is the first.
        """
        report, first = f"Rank {self.rank} failed: {text}", ""
        with contextlib.suppress(dist.DistError):
            first = bytes(self._store.compare_set(_FAILED, "", report)).decode()
            self.answer()
            self._store.set(f"left/{self.rank}", "")
        return first if first not in ("", report) else None

    def await_others(self, *, but: Sequence[int] = ()) -> None:
        """On rank 0, which may host the store, wait up to 5 s for all ranks to report their end.

        Args:
            but: Ranks with nothing more to send.
        """
        with contextlib.suppress(dist.DistError):
            keys = [f"left/{rank}" for rank in self.ranks[1:] if rank not in but]
            if self.coordinates and keys:
                self._await(keys, _EXIT_GRACE_S)

    def failure(self) -> str | None:
        """Return the first failed rank's report, or None without a failure.

        Raises:
            DistError: The store is gone.
        """
        return bytes(self._store.get(_FAILED)).decode() if self._store.check([_FAILED]) else None

    def answer(self) -> None:
        """Answer another rank's failure: this rank is alive."""
        self._store.set(f"here/{self.rank}", "")

    def silent_ranks(self, timeout_s: float) -> list[int]:
        """Return the ranks without a timely answer to a failure. Call it after `fail`."""
        ranks = self.ranks
        with contextlib.suppress(dist.DistError):
            if not self._await([f"here/{rank}" for rank in ranks], timeout_s):
                return [rank for rank in ranks if not self._store.check([f"here/{rank}"])]
        return []

    @contextlib.contextmanager
    def _reaching(self, key: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            _connections.pop(self._source, None)  # it may be broken: a later call takes a new one
            raise self._lost(key, error) from error

    def _lost(self, key: str, error: Exception | None) -> LaunchError:
        reason = None if error is None else str(error).splitlines()[0]
        return LaunchError("The store lost a message", where=f"key {key}, rank {self.rank}", found=reason)

    def _silent(self, key: str, error: Exception) -> LaunchError:
        return LaunchError(
            f"No message from rank {key.rpartition('/')[2]}",
            where=f"key {key}, rank {self.rank}",
            expected=f"one within {self.timeout_s:.0f} s",
            found=str(error).splitlines()[0],
            fix="Check that rank's log: it may have died or hung.",
        )

    def _await(self, keys: list[str], timeout_s: float, *, watch: bool = False) -> bool:
        """Poll until all `keys` are stored or the time is over. `watch` also checks for a failed rank."""
        return self._poll(lambda: bool(self._store.check(keys)), timeout_s, watch=watch)

    def _poll(self, is_there: Callable[[], bool], timeout_s: float, *, watch: bool) -> bool:
        began = time.monotonic()
        while not is_there():
            if watch and (failure := self.failure()) is not None and not is_there():
                raise LaunchError(failure.rstrip("."))
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                return False
            # An eighth of the time waited so far, which bounds the delay. However many ranks wait for long, the store's
            # host gets at most 20,000 requests a second.
            first_s, longest_s = 0.0005 + self.world_size / 200_000, 0.02 + self.world_size / 20_000
            time.sleep(min(max(first_s, waited_s / 8), longest_s))
        return True


def _chunks(key: str, value: bytes) -> list[str]:
    """Return the keys of a message's chunks. Empty if its key's value holds it."""
    return [] if value.startswith(_SMALL) else [f"{key}/{index}" for index in range(int(value))]


def single_rank_channel() -> StoreChannel:
    """Return a channel for a single-rank run."""
    return StoreChannel(HashStore(), 0, world_size=1, timeout_s=60.0)
