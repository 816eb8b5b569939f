"""Measure how two ranks of a host can write columns into one file: `python -m scripts.bench.columns [--folder FOLDER]`.

Each rank holds half of every row of each tensor. The columns go through memory that the ranks share, as in a save, into
the file by a strided copy to a mapping of it, or by a `pwrite` for each run of a row. The ways take turns, beside a raw
write of as many bytes; all of them end with the file synced, and the ratios are within a round.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
from numpy.random import default_rng

from reprise.files import Files
from reprise.format.manifest import digest_of
from reprise.layout import Box, TensorKind, TensorSpec, build_layout
from reprise.live_tensors import map_memory
from reprise.saving.column_sharing import SharedMemory, Sharing, shared_bytes, stripes_of
from reprise.saving.plan import CHUNK_BYTES, ChunkPart, Piece, cut
from reprise.saving.snapshot import Snapshot
from reprise.saving.writer import THREADS, PieceDigests, Writer
from reprise.storage.worker import Worker
from reprise.tensors.memory import Arena, Bytes, HostMemory
from scripts.bench import machine, tables
from scripts.bench.probe import seconds_of, sync_folder
from scripts.bench.rounds import rotated
from trainer.commands.arguments import existing_folder

RANKS = 2
DIRECT, SHARED, MAPPED = "raw write, O_DIRECT", "shared memory, as in a save", "copy to the mapped file"
RUNS, READ_BACK = "pwrite for each run", "reading the file back"
_TENSORS = 16
_TIMEOUT_S = 600.0

Rounds = list[dict[str, tuple[float, float]]]  # seconds, and those of CPU


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure runs of several lengths, and print a table for each."""
    parser = argparse.ArgumentParser(prog="columns", description=__doc__)
    parser.add_argument(
        "--folder", type=existing_folder, default=Path(), help="a folder is made in it, and removed at the end"
    )
    parser.add_argument("--runs", type=int, nargs="+", default=[2048, 4096, 7168], help="bytes of a row on each rank")
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the file (%(default)d)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (%(default)d)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="columns-", dir=options.folder) as folder:
        print("\n".join(f"- {line}" for line in machine.describe(Path(folder))))
        for run_bytes in options.runs:
            rounds = run_ranks(Path(folder), run_bytes, options.mebibytes << 20, options.rounds)
            head = [f"runs of {run_bytes} B, {options.mebibytes} MiB", "durable, s", "range", "to raw write", "CPU, s"]
            print("\n".join(["", *tables.table(head, list(_rows(rounds)))]), flush=True)


def _rows(rounds: Rounds) -> Iterator[list[str]]:
    for way in rounds[0]:
        seconds, cpu = zip(*(row[way] for row in rounds), strict=True)
        medians = statistics.median(seconds), statistics.median(row[way][0] / row[DIRECT][0] for row in rounds)
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        yield [way, f"{medians[0]:.3f}", spread, f"{medians[1]:.2f}", f"{statistics.median(cpu):.2f}"]


def run_ranks(folder: Path, run_bytes: int, total_bytes: int, rounds: int) -> Rounds:
    """Start the ranks; return, by round after the first, each way's time on the slower rank and CPU time on both."""
    context = multiprocessing.get_context("spawn")
    barrier, pipes = context.Barrier(RANKS), [context.Pipe() for _ in range(RANKS)]
    shared = (folder, run_bytes, total_bytes, rounds, barrier)
    processes = [context.Process(target=_serve, args=(rank, pipe[1], *shared)) for rank, pipe in enumerate(pipes)]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # so that a process that has died is noticed
        pipes[1][0].send(pipes[0][0].recv())  # the address of the shared memory
        rounds_of_ranks = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        {way: (max(a[way][0], b[way][0]), a[way][1] + b[way][1]) for way in a}
        for a, b in zip(*rounds_of_ranks, strict=True)
    ][1:]


def _serve(
    rank: int, pipe: Connection, folder: Path, run_bytes: int, total_bytes: int, rounds: int, barrier: Barrier
) -> None:
    memory = SharedMemory.make() if rank == 0 else SharedMemory.open(pipe.recv())
    assert memory is not None
    if rank == 0:
        pipe.send(memory.address)
    columns, target, results = _Columns(rank, run_bytes, total_bytes, memory), folder / "checkpoint", Rounds()
    for number in range(rounds + 1):  # in the first one, memory of the page cache comes from the host of this machine
        results.append(dict.fromkeys([*columns.ways, READ_BACK], (0.0, 0.0)))  # in the order of the table
        for way in rotated(list(columns.ways), number):
            if rank == 0:
                target.mkdir()
                os.sync()
            measured = {way: columns.ways[way], **({READ_BACK: columns.read_back} if way == MAPPED else {})}
            for name, call in measured.items():
                barrier.wait(_TIMEOUT_S)
                cpu = time.process_time()
                results[-1][name] = seconds_of(partial(call, target)), time.process_time() - cpu
            barrier.wait(_TIMEOUT_S)
            if rank == 0:
                shutil.rmtree(target)
    pipe.send(results)
    barrier.wait(_TIMEOUT_S)  # the memory is the other rank's too


class _Columns:
    """The columns of a rank in memory, tensor after tensor, and the ways of writing them."""

    def __init__(self, rank: int, run_bytes: int, total_bytes: int, memory: SharedMemory) -> None:
        shape = (total_bytes // (_TENSORS * RANKS * run_bytes), RANKS * run_bytes)
        specs = [TensorSpec(TensorKind.MODEL, f"{number}", shape, torch.uint8, shape) for number in range(_TENSORS)]
        self._rank, self._layout, self._files = rank, build_layout(specs), Files()
        self._file = self._layout.files[0]  # the only one
        boxes = [Box((0, number_of_rank * run_bytes), (shape[0], run_bytes)) for number_of_rank in range(RANKS)]
        pieces = [[Piece(spec.name, box, 0, box.numel) for spec in specs] for box in boxes]
        self._pieces, self._data = pieces[rank], map_memory(_TENSORS * boxes[rank].numel)
        self._data[:] = np.frombuffer(default_rng(rank).bytes(self._data.nbytes), np.uint8)
        stripes = stripes_of([piece for of_rank in pieces for piece in of_rank], self._layout)
        memory.reach(shared_bytes(stripes))
        self.ways: dict[str, Callable[[Path], None]] = {
            DIRECT: self._write_raw,
            SHARED: partial(self._write_as_saves_do, Sharing(memory, stripes, self._layout, turn=rank / RANKS)),
            MAPPED: self._write_mapped,
            RUNS: partial(self._write_as_saves_do, None),
        }

    def read_back(self, folder: Path) -> None:
        """Read and digest half of the file from the page cache, as digests of extents of it would need."""
        share = -(-self._file.total_bytes // RANKS)
        buffer = map_memory(CHUNK_BYTES)
        with (folder / self._file.name).open("rb", buffering=0) as file:
            for at in range(self._rank * share, (self._rank + 1) * share, CHUNK_BYTES):
                digest_of(buffer[: self._files.read(file.fileno(), buffer.data, offset=at)].data)

    def _write_raw(self, folder: Path) -> None:
        path = folder / f"raw{self._rank}"
        with path.open("wb", buffering=0) as file:
            self._files.reserve(file.fileno(), self._data.nbytes)
            with open(os.open(path, os.O_WRONLY | os.O_DIRECT), "wb", buffering=0) as target:
                for at in range(0, self._data.nbytes, CHUNK_BYTES):
                    self._files.write(target.fileno(), [self._data[at : at + CHUNK_BYTES].data], offset=at)
            self._files.sync(file.fileno())
        sync_folder(folder)

    def _write_as_saves_do(self, sharing: Sharing | None, folder: Path) -> None:
        chunks = cut(self._pieces, self._layout)
        order = [chunk for extents in chunks.values() for extent in extents for chunk in extent]
        tensors = zip(self._pieces, torch.from_numpy(self._data).chunk(_TENSORS), strict=True)
        memory = {piece.name: HostMemory(data, is_private=False) for piece, data in tensors}
        snapshot = Snapshot(memory, order, arena=Arena(0, is_pinned=False), stall_timeout_s=_TIMEOUT_S)
        writer = Writer(
            folder, self._files, self._layout, THREADS, lambda _: None, leads=self._rank == 0, sharing=sharing
        )
        writer.write(self._pieces, chunks, snapshot)
        sync_folder(folder)

    def _write_mapped(self, folder: Path) -> None:
        """Copy the columns of several tensors at once, on as many threads as a save has."""
        with open(self._files.open_for_writing(folder / self._file.name), "r+b", buffering=0) as file:
            self._files.reserve(file.fileno(), self._file.total_bytes)
            mapped = np.frombuffer(mmap.mmap(file.fileno(), self._file.total_bytes), np.uint8)
            pool = Worker("columns", threads=THREADS)
            tensors = zip(self._pieces, np.split(self._data, _TENSORS), strict=True)
            for job in [pool.submit(partial(self._copy, piece, data, mapped)) for piece, data in tensors]:
                job.wait()
            pool.close()
            self._files.sync(file.fileno())
        sync_folder(folder)

    def _copy(self, piece: Piece, data: Bytes, mapped: Bytes) -> None:
        """Digest the columns of a tensor and copy them, chunk by chunk."""
        digests, place = PieceDigests(), self._layout.places[piece.name]
        packed = place.spec.image(piece.box)
        for lo in range(0, piece.hi, CHUNK_BYTES):
            hi = min(piece.hi, lo + CHUNK_BYTES)
            digests.add(ChunkPart(piece, lo, hi), data[lo:hi].data)
            for shape, start, at in packed.boxes(lo, hi):
                destination = np.ndarray(shape, np.uint8, mapped.data, place.offset + start, packed.strides)
                np.copyto(destination, data[at : at + destination.size].reshape(shape))


if __name__ == "__main__":
    main()
