"""Stand-ins that tests share: ranks as threads, a file system that fails on demand, a state cut over ranks."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from reprise.format import FORMAT, STATE, StoredDtype, TensorKind, TensorSpec
from reprise.format.box import Split, box_of_splits
from reprise.ranks import StoreChannel, single_rank_channel
from reprise.saving import Checkpointer, SavePolicy
from reprise.saving.snapshot import Snapshot
from reprise.storage import Files, Json
from reprise.storage.worker import Job
from reprise.tensors import Contents, LiveTensor, stored_dtype, torch_dtype
from trainer.data.data_file import DataFile, TokenArray
from trainer.data.token_file import HEADER_BYTES, TokenFile
from trainer.metrics.run_log import IterationRecord

T = TypeVar("T")
JOIN_S = 120.0  # what has not ended by then hangs, on the slowest machine


class Clock:
    """A clock that stands still until it is set, in place of `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def tokens_in_memory(tokens: TokenArray, name: str = "memory") -> TokenFile:
    """Return a token file that lies on no disk."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, bytes(HEADER_BYTES) + tokens.tobytes())
    file = DataFile(Path(f"/proc/self/fd/{descriptor}"))
    os.close(descriptor)
    file.path = Path(name)
    return TokenFile(file, np.dtype(tokens.dtype), tokens.size)


def iteration_record(iteration: int, *, loss: float = 2.5, tokens: int = 1000, seconds: float = 0.5) -> IterationRecord:
    """Return the figures of an iteration of one sample."""
    return IterationRecord(
        iteration=iteration,
        loss=loss,
        grad_norm=0.1,
        lr=1e-3,
        consumed_samples=iteration,
        tokens=tokens,
        seconds=seconds,
        checkpoint_seconds=0.0,
    )


def open_files() -> list[str]:
    """Return the paths that this process has open, without devices, pipes and sockets.

    An earlier test's process group closes those of its own when its threads end, at any time.
    """
    gc.collect()  # what earlier tests left in cycles
    paths = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in paths if path.startswith("/") and not path.startswith("/dev/"))


def tcp_store() -> Store:
    """Return a real store on a free port of this host."""
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def run_ranks(
    world_size: int,
    call: Callable[[StoreChannel], T],
    *,
    store: Callable[[], Store] = HashStore,
    timeout_s: float = JOIN_S,
) -> list[T | BaseException]:
    """Run `call` once per rank, each on a thread with its own channel; return what each returned or raised."""
    outcomes: list[T | BaseException] = [RuntimeError("the rank did not end")] * world_size
    channels = [single_rank_channel()]
    if world_size > 1:
        shared = store()
        channels = [
            StoreChannel(shared, rank, world_size=world_size, timeout_s=timeout_s) for rank in range(world_size)
        ]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = call(channels[rank])
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    return outcomes


def all_ranks(world_size: int, call: Callable[[StoreChannel], T], *, store: Callable[[], Store] = HashStore) -> list[T]:
    """Run `call` once per rank; raise the first error of any."""
    results: list[T] = []
    for outcome in run_ranks(world_size, call, store=store):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


class FailingFiles(Files):
    """A file system whose call of one kind fails, from the `after`-th on, while `is_armed`."""

    def __init__(self, kind: str, code: int = errno.EIO, *, after: int = 0) -> None:
        self._kind, self._code, self._left = kind, code, after
        self.is_armed = True
        self.failures = 0

    def _maybe_fail(self, kind: str, path: Path | None = None) -> None:
        if kind != self._kind or not self.is_armed:
            return
        if self._left > 0:
            self._left -= 1
            return
        self.failures += 1
        raise OSError(self._code, os.strerror(self._code), None if path is None else str(path))


def _failing(kind: str) -> Callable[..., object]:
    """Return a call of `FailingFiles`; what fails to be closed is closed all the same."""
    real = getattr(Files, kind)

    def call(files: FailingFiles, *arguments: object, **keywords: object) -> object:
        if kind == "close":
            real(files, *arguments)
        files._maybe_fail(kind, next((each for each in reversed(arguments) if isinstance(each, Path)), None))
        return real(files, *arguments, **keywords) if kind != "close" else None

    return call


for _kind in (
    *("make_folder", "open_for_writing", "open_for_reading", "close", "reserve", "read", "write", "sync"),
    *("sync_folder", "write_new", "rename", "remove", "free_bytes"),
):
    setattr(FailingFiles, _kind, _failing(_kind))


class CountedReads(Files):
    """Counts the bytes read, and fails once told to."""

    def __init__(self, *, fails_after: int | None = None) -> None:
        self.read_bytes, self._fails_after = 0, fails_after
        self._lock = threading.Lock()

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        with self._lock:
            self.read_bytes += buffer.nbytes
            if self._fails_after is not None and self.read_bytes > self._fails_after:
                raise OSError(errno.EIO, "it failed")
        return super().read(descriptor, buffer, offset=offset)


class StuckFiles(Files):
    """A file system that hangs in its first write until `released` is set."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.reached = threading.Event()

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self.reached.set()
        self.released.wait(JOIN_S)
        super().write(descriptor, data, offset=offset)


def open_when_awaited(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """Open a gate before the disk when training waits for it: a step that has copied what it can, or for the end."""
    wait_written, wait_job = Snapshot._await_written, Job.wait

    def step_waits(snapshot: Snapshot) -> None:
        if snapshot._live:
            gate.set()
        wait_written(snapshot)

    def end_is_awaited(job: Job, timeout_s: float | None = None, *, where: object = None) -> None:
        gate.set()
        wait_job(job, timeout_s, where=where)

    monkeypatch.setattr(Snapshot, "_await_written", step_waits)
    monkeypatch.setattr(Job, "wait", end_is_awaited)


@dataclass(frozen=True)
class Axis:
    """A simulated mesh axis: `role` is replica, row (first dimension), column (last) or strided row."""

    role: str
    size: int


@dataclass(frozen=True)
class Sharding:
    """A simulated mesh: how every tensor of a state is cut over ranks; the last axis is the fastest."""

    name: str
    axes: tuple[Axis, ...] = ()

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def splits(self, rank: int, dims: int) -> list[Split]:
        """Return the cuts that lead to `rank`'s box of a tensor of `dims` dimensions."""
        found: list[Split] = []
        row_size = 1  # product of the plain row axes to the right
        for axis in reversed(self.axes):
            rank, index = divmod(rank, axis.size)
            if axis.role == "replica" or dims == 0:
                continue
            strided = row_size if axis.role == "strided row" else 1
            found.insert(0, Split(dims - 1 if axis.role == "column" else 0, index, axis.size, strided))
            if found[0].dim == 0:
                row_size *= axis.size
        return found

    def live(self, rank: int, specs: Sequence[TensorSpec], state: dict[str, torch.Tensor]) -> list[LiveTensor]:
        """Return `rank`'s parts of `state`, in memory of their own, laid out as a shard in a model would be."""
        parts = []
        for spec in specs:
            mine = self.splits(rank, len(spec.view))
            box = box_of_splits(spec.view, mine)
            replicas = tuple(r for r in range(self.world_size) if self.splits(r, len(spec.view)) == mine)
            index = tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))
            parts.append(LiveTensor(spec, box, state[spec.name].reshape(spec.view)[index].clone(), replicas))
        return parts


SHARDINGS = (
    Sharding("one rank"),
    Sharding("2 replicas", (Axis("replica", 2),)),
    Sharding("3 replicas", (Axis("replica", 3),)),
    Sharding("rows over 2", (Axis("row", 2),)),
    Sharding("rows over 3", (Axis("row", 3),)),
    Sharding("more ranks than rows", (Axis("row", 8),)),
    Sharding("columns over 2", (Axis("column", 2),)),
    Sharding("rows and columns", (Axis("row", 2), Axis("column", 2))),
    Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2))),
    Sharding("strided rows over rows", (Axis("strided row", 3), Axis("row", 2))),
)


def sample_specs() -> list[TensorSpec]:
    """Return specs of every awkward kind: narrow, uneven, large, 0-d, empty, viewed otherwise, several item sizes."""

    def spec(
        kind: TensorKind, name: str, shape: tuple[int, ...], dtype: StoredDtype, view: tuple[int, ...] = ()
    ) -> TensorSpec:
        return TensorSpec(kind, name, shape, dtype, view or shape)

    return [
        spec(TensorKind.MODEL, "embedding", (1201, 1000), StoredDtype.F32),  # more than a digest block
        spec(TensorKind.MODEL, "attention", (6, 24), StoredDtype.F32, (6, 3, 8)),
        spec(TensorKind.MODEL, "half", (7, 6), StoredDtype.BF16),
        spec(TensorKind.MODEL, "bias", (5,), StoredDtype.F32),
        spec(TensorKind.MODEL, "flags", (3,), StoredDtype.BOOL),
        spec(TensorKind.MODEL, "count", (), StoredDtype.I64),
        spec(TensorKind.MODEL, "nothing", (0, 4), StoredDtype.F32),
        spec(TensorKind.OPTIMIZER, "exp_avg.embedding", (1201, 100), StoredDtype.F32),  # more than a small tensor
        spec(TensorKind.OPTIMIZER, "exp_avg.bias", (5,), StoredDtype.F32),
        spec(TensorKind.OPTIMIZER, "step.bias", (), StoredDtype.F32),
    ]


def sample_state(specs: Sequence[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Return random bytes of every spec; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for spec in specs:
        high = 2 if spec.dtype is StoredDtype.BOOL else 128
        raw = torch.randint(0, high, (spec.total_bytes,), generator=generator, dtype=torch.uint8)
        state[spec.name] = raw.view(torch_dtype(spec.dtype)).reshape(spec.shape)
    return state


def lone_contents(
    values: dict[str, torch.Tensor], documents: dict[str, Json], *, optimizer: dict[str, torch.Tensor] | None = None
) -> Contents:
    """Return the contents of a run of one rank."""
    kinds = [(TensorKind.MODEL, values), (TensorKind.OPTIMIZER, optimizer or {})]
    live = []
    for kind, tensors in kinds:
        for name, value in tensors.items():
            spec = TensorSpec(kind, name, tuple(value.shape), stored_dtype(value.dtype, where=name), tuple(value.shape))
            live.append(LiveTensor(spec, box_of_splits(spec.view, []), value, (0,)))
    return Contents(tuple(t.spec for t in live), tuple(live), {}, documents)


def save_parts(
    folder: Path,
    iteration: int,
    contents: Callable[[int], Contents],
    *,
    ranks: int = 1,
    nonce: str = "n",
    **policy: Any,
) -> Path:
    """Save each rank's contents, and return the checkpoint."""

    def call(channel: StoreChannel) -> Path:
        checkpointer = Checkpointer(SavePolicy(folder, **policy), channel, nonce=nonce)
        checkpointer.start()
        report = checkpointer.save(iteration, contents(channel.rank))
        checkpointer.close()
        assert report is not None
        assert report.error is None, report.error
        return report.path

    return all_ranks(ranks, call)[0]


def save_sample(
    folder: Path,
    sharding: Sharding = SHARDINGS[0],
    iteration: int = 10,
    *,
    seed: int = 7,
    aliases: dict[str, str] | None = None,
) -> Path:
    """Save the sample tensors, and return the checkpoint."""
    specs, document = sample_specs(), {STATE: {"format": FORMAT, "iteration": iteration}}
    state = sample_state(specs, seed=seed)

    def contents(rank: int) -> Contents:
        return Contents(tuple(specs), tuple(sharding.live(rank, specs, state)), aliases or {}, document)

    return save_parts(folder, iteration, contents, ranks=sharding.world_size)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flip_bit(path: Path, at: int = -1) -> None:
    """Flip a bit in one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
