"""A state saved at any sharding is the same bytes, and loads at any other sharding to the same bits."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reprise.commit import joint_plan
from reprise.commit.joint_plan import tile
from reprise.errors import CheckpointError, MismatchError
from reprise.format import manifest
from reprise.format.box import Box, whole
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, WrittenPiece
from reprise.format.names import FORMAT, STATE
from reprise.loading import blocks
from reprise.loading.loader import fill
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places
from reprise.storage.files import Files
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.live import LiveTensor
from tests.fakes import JOIN_S, SHARDINGS, bits, flip_bit, lone_contents, sample_state, save_parts
from tests.messages import refused
from tests.profiles import examples, slow
from tests.unit.reprise.format.test_box import boxes

Cut = tuple[tuple[int, ...], list[tuple[int, ...]], list[int], Box]


@st.composite
def cut_tensors(draw: st.DrawFn) -> Cut:
    """Draw a shape, how writers cut its dimensions, where replicas cut each cell, and a box of it to load."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple))
    cuts = [(0, *sorted(draw(st.sets(st.integers(1, n), max_size=2)) - {n}), n) for n in shape]
    shares = [draw(st.integers(0, 40)) for _ in range(math.prod(len(marks) - 1 for marks in cuts))]
    return shape, cuts, shares, draw(boxes(shape))


@settings(examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_tensors(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.integers(1, 3), st.booleans())
@example(((12,), [(0, 12)], [20], Box((0,), (12,))), torch.float32, 1, False)  # a piece begins in the second block
def test_any_box_loads_from_any_cut_to_numpy_s_bytes(
    tmp_path: Path, case: Cut, dtype: torch.dtype, threads: int, is_transposed: bool
) -> None:
    shape, cuts, shares, box = case
    spec = TensorSpec(TensorKind.MODEL, "t", shape, stored_dtype(dtype, where="t"), shape)
    (values,) = sample_state([spec], seed=3).values()
    array = np.frombuffer(bits(values), np.uint8).reshape(*shape, dtype.itemsize)
    layout = build_layout([spec], file_bytes=1 << 20)
    place = layout.places["t"]
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, blocks, joint_plan):
            patch.setattr(module, "BLOCK_BYTES", 16)
        written = []
        for cell, share in zip(itertools.product(*map(itertools.pairwise, cuts)), shares, strict=True):
            part = Box(tuple(lo for lo, _ in cell), tuple(hi - lo for lo, hi in cell))
            data = array[part.slices].tobytes()
            for lo, hi in itertools.pairwise(sorted({0, min(share, len(data)), len(data)})):
                parts = [data[at : min(at + 16, hi)] for at in range(lo, hi, 16)]
                digests = b"".join(bytes.fromhex(manifest.digest_of(block)) for block in parts)
                written.append(WrittenPiece("t", part, lo, hi, digests))
        found = manifest.Manifest("a", {}, tile(layout, written), {})
        (tmp_path / place.file).write_bytes(bytes(place.offset) + array.tobytes())
        local = torch.zeros(box.shape, dtype=dtype)
        local = local.T.contiguous().T if is_transposed and local.ndim == 2 else local
        files = Files()
        files.reading_threads = threads
        checkpoint = Checkpoint(tmp_path, files, found, {}, _places=layout.places)
        fill(checkpoint, [LiveTensor(spec, box, local, (0,))])
    assert bits(local) == array[box.slices].tobytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a state of several files, two of whose tensors have several blocks."""
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.rand(n, 1024, generator=generator) for name, n in (("a", 2500), ("b", 3), ("c", 4000))}
    document = {STATE: {"format": FORMAT, "iteration": 10}}
    return save_parts(tmp_path_factory.mktemp("run"), 10, lambda _: lone_contents(values, document), file_bytes=9 << 20)


class Opened:
    """A checkpoint that is open, and fresh tensors for all of it."""

    def __init__(self, path: Path, files: Files | None = None, *, threads: int | None = None) -> None:
        files = files or Files()
        files.reading_threads = threads
        self.checkpoint = open_checkpoint(path, files)
        self.places = read_places(self.checkpoint)
        self.live = SHARDINGS[0].live(
            0,
            [place.spec for place in self.places.values()],
            {name: torch.zeros(place.spec.shape) for name, place in self.places.items()},
        )

    def fill(self, **options: Any) -> list[bytes]:
        """Fill the tensors; check that this leaves no thread and no open file behind, however it ends."""
        before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
        try:
            fill(self.checkpoint, self.live, **options)
        finally:
            assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
        return [bits(tensor.local) for tensor in self.live]


@pytest.mark.parametrize(("threads", "step"), [(2, 5), *(slow(threads, 1) for threads in (1, 2, 4))])
def test_the_first_damaged_block_in_file_order_is_named(large: Path, tmp_path: Path, threads: int, step: int) -> None:
    folder = shutil.copytree(large, tmp_path / "iter_0000010")
    blocks = [
        (place, lo)
        for place in sorted(Opened(folder).places.values(), key=lambda place: (place.file, place.offset))
        for lo in range(0, place.spec.total_bytes, BLOCK_BYTES)
    ]
    assert len(blocks) > 6
    for place, lo in reversed(blocks[::step]):  # so that all behind it are damaged too
        flip_bit(folder / place.file, place.offset + lo + 17)
        hi = min(lo + BLOCK_BYTES, place.spec.total_bytes)
        with refused(CheckpointError, f"{place.file}, tensor {place.spec.name}, bytes [{lo}, {hi})"):
            Opened(folder, threads=threads).fill()


class Troubled(Files):
    """A file system whose reads of blocks do something else."""

    def __init__(self, deed: Callable[[], int]) -> None:
        self.deed = deed

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        extra = self.deed() if buffer.nbytes == Files.step_bytes else 0
        return super().read(descriptor, buffer, offset=offset) + extra


def fail(error: type[Exception]) -> int:
    raise error("it failed")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("deed", "error", "words"),
    [
        (lambda: -1, CheckpointError, "model-00001-of"),  # the file ends early
        (partial(fail, OSError), CheckpointError, "model-00001-of"),
        (partial(fail, ZeroDivisionError), ZeroDivisionError, "^it failed$"),  # none of ours
    ],
)
def test_a_failing_read_ends_the_load_and_names_the_file(
    large: Path, threads: int, deed: Callable[[], int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Opened(large, Troubled(deed), threads=threads).fill()


def test_a_failing_worker_stops_the_others_at_their_next_block(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = threading.Event(), blocks.BlockReader.close
    told, reads = list[bool](), itertools.count()

    def close_and_tell(reader: blocks.BlockReader) -> None:
        close(reader)
        closed.set()

    def fail_once() -> int:
        if next(reads) == 0:
            raise OSError(errno.EIO, "it failed")
        told.append(closed.wait(JOIN_S))
        return 0

    monkeypatch.setattr(blocks.BlockReader, "close", close_and_tell)
    with pytest.raises(CheckpointError, match="it failed"):
        Opened(large, Troubled(fail_once), threads=2).fill()
    assert all(told)
    assert len(told) <= BLOCK_BYTES // Files.step_bytes  # the block that it had begun


def test_a_cancelled_load_does_not_wait_for_a_hanging_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PROGRESS_S", 0.01)
    monkeypatch.setattr(blocks, "_LEAVE_S", 0.01)
    released, reached = threading.Event(), list[int]()

    def hang() -> int:
        reached.append(1)
        return not released.wait(JOIN_S)

    def break_off(done: int) -> None:
        if len(reached) == 2:
            raise KeyboardInterrupt

    opened = Opened(large, Troubled(hang), threads=2)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        fill(opened.checkpoint, opened.live, progress=break_off)
    reading = [thread for thread in threading.enumerate() if thread.name == "checkpoint-reader"]
    assert [thread.daemon for thread in reading] == [True, True]
    released.set()
    for thread in reading:
        thread.join(JOIN_S)
    assert threading.active_count() == before


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (1100, 2), (3100, 4)])
def test_a_small_checkpoint_takes_a_single_thread(
    rows: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, document = list[str](), {STATE: {"format": FORMAT, "iteration": 1}}
    values = {"a": torch.zeros(rows, 1024), "b": torch.zeros(3)}
    path = save_parts(tmp_path, 1, lambda _: lone_contents(values, document))
    start = blocks.Worker

    def note(name: str) -> blocks.Worker:
        names.append(name)
        return start(name)

    monkeypatch.setattr(blocks, "Worker", note)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    opened = Opened(path)
    fill(opened.checkpoint, opened.live)
    assert names == ["checkpoint-reader"] * threads


def test_progress_rises_to_all_bytes_on_the_calling_thread(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PROGRESS_S", 0.0)
    told, called, go_on = list[int](), set[int](), threading.Event()

    def progress(done: int) -> None:
        told.append(done)
        called.add(threading.get_ident())
        go_on.set()

    opened = Opened(large, Troubled(lambda: not go_on.wait(JOIN_S)))
    opened.fill(progress=progress)
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0, sum(tensor.spec.total_bytes for tensor in opened.live))
    assert called == {threading.get_ident()}


def test_what_does_not_fit_is_refused_before_filling(large: Path) -> None:
    opened, filled = Opened(large), Opened(large)
    filled.fill()
    (rows,) = (bits(tensor.local[:2]) for tensor in filled.live if tensor.spec.name == "b")
    tensors = opened.checkpoint.manifest.tensors
    digests = bytes.fromhex(manifest.digest_of(rows))
    short = {**tensors, "b": replace(tensors["b"], cuts=((0, 2), (0, 1024)), digests=digests)}
    lacking = replace(opened.checkpoint, manifest=replace(opened.checkpoint.manifest, tensors=short))
    with refused(CheckpointError, "iter_0000010"):  # the manifest lacks a part
        fill(lacking, opened.live)
    spec = replace(opened.places["c"].spec, view=(4000, 32, 32))
    opened = Opened(large)
    shard = LiveTensor(spec, Box((0, 0, 0), (4000, 16, 32)), torch.zeros(4000, 16, 32), (0,))
    with refused(MismatchError, ", c)"):  # a shard of other dimensions
        fill(opened.checkpoint, [*opened.live[:2], shard])
    assert not opened.live[0].local.any()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_whole_tensor_may_live_in_other_dimensions(large: Path, is_transposed: bool) -> None:
    opened, shape = Opened(large), (2500, 32, 32)
    local = torch.zeros(32, 32, 2500).permute(2, 1, 0) if is_transposed else torch.zeros(shape)
    opened.live = [LiveTensor(replace(opened.places["a"].spec, view=shape), whole(shape), local, (0,))]
    opened.fill()
    assert torch.equal(local, torch.rand(2500, 1024, generator=torch.Generator().manual_seed(1)).reshape(shape))
