"""Threads that run one at a time, in an order that a test draws, on a clock that only waits move; and a store for them.

What such threads do is the same in every run of a test, whatever the machine does: each hands over at every call to the
store, every sleep and wherever else it takes a `turn`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

_STUCK_S = 120.0  # real seconds: no thread computes that long between two turns


class Gone(BaseException):
    """Ends a thread that is left over."""


@dataclass
class Task:
    """A thread that takes turns; `rank` is whose it is."""

    name: str
    rank: int
    call: Callable[[], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wakes_at: float = 0.0
    is_over: bool = False
    is_held: bool = False  # for ever: it hangs, or its process is dead
    error: BaseException | None = None


class Turns:
    """Runs tasks turn by turn; as `time`, it is the clock of those that run.

    Args:
        seed: of the order.
        limit_s: on the clock: what is not over by then counts as hanging.
    """

    def __init__(self, seed: int, *, limit_s: float) -> None:
        self._random, self._limit_s, self._now = random.Random(seed), limit_s, 0.0
        self._tasks: list[Task] = []
        self._back = threading.Semaphore(0)
        self._current: Task | None = None
        self._is_closing = False

    def add(self, name: str, rank: int, call: Callable[[], None]) -> Task:
        """Add a task, which does not run before `run`."""
        self._tasks.append(Task(name, rank, call))
        return self._tasks[-1]

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let the others go on for so long on the clock."""
        if self._current is not None:
            self._current.wakes_at = self._now + seconds
        self.turn()

    def turn(self) -> None:
        """Let any task go on, perhaps this one."""
        task = self._current
        if task is None:  # the test itself
            return
        if not self._is_closing:
            self._back.release()
            task.go.acquire()
        if self._is_closing:
            raise Gone

    def hang(self) -> None:
        """Never go on."""
        if self._current is not None:
            self._current.is_held = True
        self.turn()

    def kill(self, rank: int) -> None:
        """Let all tasks of a rank end here and now, as their process does."""
        for task in self._tasks:
            task.is_held |= task.rank == rank
        self.turn()

    def run(self) -> None:
        """Run all tasks until they are over, hang, or the clock is past the limit; then end what is left."""
        threads = [threading.Thread(target=self._main, args=(task,), daemon=True) for task in self._tasks]
        for thread in threads:
            thread.start()
        while ready := [task for task in self._tasks if not (task.is_over or task.is_held)]:
            awake = [task for task in ready if task.wakes_at <= self._now]
            if awake:
                self._resume(self._random.choice(awake))
            elif (wakes_at := min(task.wakes_at for task in ready)) <= self._limit_s:
                self._now = wakes_at
            else:
                break
        unfinished = [task for task in self._tasks if not task.is_over]
        self._is_closing = True
        for task in unfinished:
            self._current = task
            task.go.release()
            assert self._back.acquire(timeout=_STUCK_S)
        for thread in threads:
            thread.join(_STUCK_S)
        for task in unfinished:
            task.is_over = False
        self._current = None

    def _resume(self, task: Task) -> None:
        self._current = task
        task.go.release()
        assert self._back.acquire(timeout=_STUCK_S), f"{task.name} computes without end"

    def _main(self, task: Task) -> None:
        task.go.acquire()
        try:
            if not self._is_closing:
                task.call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            task.error = error
        task.is_over = True
        self._back.release()


class Fault(Enum):
    """What a call to the store meets."""

    HANGS = "never returns"
    DROPS = "returns as if it were done, if it has no answer, else raises"
    REPEATS = "is done again after the next call of anybody"
    FAILS = "raises, and is not done"
    LATE = "raises after it is done"
    KILLS = "is the last thing its process does"


class FaultyStore(Store):  # type: ignore[misc]
    """A store whose calls take turns; the faults are given by rank and number of the rank's call.

    A dead store fails every call, as one whose host is gone; a stopped one lets every call hang.
    """

    def __init__(
        self, turns: Turns, faults: Mapping[tuple[int, int], Fault], *, stops_at: int | None, dies_at: int | None
    ) -> None:
        super().__init__()
        self._turns, self._faults, self._stops_at, self._dies_at = turns, faults, stops_at, dies_at
        self.inner = HashStore()
        self.calls = 0
        self._by_rank: dict[int, int] = {}
        self._again: list[Callable[[], object]] = []

    def of(self, rank: int) -> RankStore:
        """Return the store as a rank sees it."""
        return RankStore(self, rank)

    def do(self, rank: int, call: Callable[[], object], *, has_answer: bool = True) -> object:
        """Do a call of a rank, or what a fault makes of it."""
        self._turns.turn()
        self.calls += 1
        number = self._by_rank[rank] = self._by_rank.get(rank, 0) + 1
        if self._stops_at is not None and self.calls >= self._stops_at:
            self._turns.hang()
        if self._dies_at is not None and self.calls >= self._dies_at:
            raise dist.DistNetworkError("Broken pipe")
        again, self._again = self._again, []
        for each in again:
            each()
        match self._faults.get((rank, number)):
            case Fault.HANGS:
                self._turns.hang()
            case Fault.KILLS:
                self._turns.kill(rank)
            case Fault.DROPS if not has_answer:
                return None
            case Fault.REPEATS:
                self._again.append(call)
            case Fault.FAILS | Fault.DROPS:
                raise dist.DistNetworkError("Connection reset by peer")
            case Fault.LATE:
                call()
                raise dist.DistNetworkError("Connection reset by peer")
        return call()


class RankStore(Store):  # type: ignore[misc]
    """What one rank calls of a faulty store."""

    def __init__(self, shared: FaultyStore, rank: int) -> None:
        super().__init__()
        self._shared, self._rank = shared, rank

    def clone(self) -> RankStore:
        """Return a connection of its own, which here is the same."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value; one that is dropped returns normally, as torch's does."""
        self._shared.do(self._rank, lambda: self._shared.inner.set(key, value), has_answer=False)

    def get(self, key: str) -> bytes:
        """Return a value; only of a key that is there."""
        return self._shared.do(self._rank, lambda: self._look(key))  # type: ignore[return-value]

    def check(self, keys: list[str]) -> bool:
        return bool(self._shared.do(self._rank, lambda: self._shared.inner.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def call() -> object:
            return self._shared.inner.compare_set(key, expected, desired)

        return self._shared.do(self._rank, call)  # type: ignore[return-value]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._shared.do(self._rank, lambda: [self._look(key) for key in keys])  # type: ignore[return-value]

    def delete_key(self, key: str) -> bool:
        return bool(self._shared.do(self._rank, lambda: self._shared.inner.delete_key(key)))

    def _look(self, key: str) -> bytes:
        if not self._shared.inner.check([key]):
            raise dist.DistStoreError("Wait timeout")
        return bytes(self._shared.inner.get(key))
