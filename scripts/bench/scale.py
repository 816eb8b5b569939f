"""Measure what grows with the ranks of a run: `python -m scripts.bench.scale [MEASURE ...] [--most RANKS] [--json]`.

Rank 0 runs the real code of a commit in this process. A second process stands for all other ranks: it stores their
messages in a real store on 127.0.0.1, and serves the store, as the agent of a launcher does. The disk is left out.
A thread that wakes every millisecond takes the place of training: its longest delay is the longest pause that a save
causes in the interpreter of rank 0.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reprise.channel import StoreChannel
from reprise.commit import finish, messages
from reprise.commit.attempt import Attempt, Hosts, SharedCommitState, key_of
from reprise.commit.inventory import Inventory
from reprise.commit.piece_tables import PieceTables, Tiling
from reprise.commit.protocol import TwoPhaseCommit
from reprise.files import Files
from reprise.folder import CheckpointFolder
from reprise.format.box import Box
from reprise.format.manifest import DIGEST_BYTES, TensorEntry, Written, WrittenPiece
from reprise.format.names import MANIFEST
from reprise.format.report import RankReport, encode
from reprise.layout import Layout, StoredDtype, TensorKind, TensorSpec, build_layout
from scripts.bench import scale_local, scale_start
from scripts.bench.machine import describe
from scripts.bench.planning import CASES, as_if_written, pieces_of_ranks
from trainer.compare.text_table import format_table
from trainer.config.compose import compose
from trainer.config.derived import topology_of
from trainer.launch.process_group import SWITCH_INTERVAL_S
from trainer.run.state import checkpoint_specs

_SAVES = 2
_TIMEOUT_S = 600.0
_ROW_ITEMS = 256
_TENSORS = 8

RankPieces = Iterator[tuple[int, list[WrittenPiece]]]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measurement at several sizes.

    Args:
        run: returns the figures at a size, by name.
        sizes: the default sizes.
        unit: of a size, in words.
    """

    run: Callable[[int], Figures]
    sizes: tuple[int, ...]
    unit: str


class Pauses:
    """Measures how long other threads are kept waiting while a block runs.

    Attributes:
        longest_s: the longest delay of a thread that asks to wake every millisecond.
    """

    _period_s = 0.001

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Pauses:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._is_over.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.perf_counter()
        while not self._is_over.is_set():
            time.sleep(self._period_s)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - before - self._period_s)
            before = now


def rows_layout(ranks: int) -> Layout:
    """Return the layout of a few tensors with a row for each rank."""
    shape = (ranks, _ROW_ITEMS)
    return build_layout(
        [TensorSpec(TensorKind.MODEL, f"layers.{n}.weight", shape, StoredDtype.F32, shape) for n in range(_TENSORS)]
    )


def rows(ranks: int) -> RankPieces:
    """Yield the pieces of each rank: its row of each tensor."""
    for rank in range(ranks):
        box, size = Box((rank, 0), (1, _ROW_ITEMS)), _ROW_ITEMS * 4
        yield rank, [WrittenPiece(f"layers.{n}.weight", box, 0, size, bytes(DIGEST_BYTES)) for n in range(_TENSORS)]


def llama_layout(_: int) -> Layout:
    """Return the layout of the training state of LLaMA-3 405B."""
    config = compose(CASES["llama3_405b"][1])
    return build_layout(list(checkpoint_specs(config.model, config.optimizer.name)))


def llama_pieces(ranks: int) -> RankPieces:
    """Yield the pieces of each rank of LLaMA-3 405B with tp 8, pp 16 and ZeRO stage 3."""
    config, layout = compose(CASES["llama3_405b"][1]), llama_layout(ranks)
    for rank, pieces in pieces_of_ranks(config, topology_of(config, ranks), layout):
        yield rank, [as_if_written(piece) for piece in pieces]


CASE_OF: Mapping[str, tuple[Callable[[int], Layout], Callable[[int], RankPieces]]] = {
    "rows": (rows_layout, rows),
    "405b": (llama_layout, llama_pieces),
}


@dataclass(slots=True)
class StepsInMemory:
    """What rank 0 does on its disk in a commit: nothing but the JSON files, in memory."""

    attempt: Attempt
    pieces: list[WrittenPiece]
    manifest_bytes: int = 0

    def write(self) -> Written:
        """Return the pieces as written."""
        return Written(self.pieces, _size_of(self.pieces))

    def inventory(self) -> Inventory:
        """Return the table of the layout."""
        return Inventory([], {}, self.attempt.layout)

    def json_files(self, tensors: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Return the JSON files."""
        files = finish.json_files(self.attempt, tensors, documents={}, aliases={})
        self.manifest_bytes = len(files[MANIFEST])
        return files

    def prepare(self, files: Mapping[str, bytes]) -> None:
        """Write nothing."""

    def rename(self) -> None:
        """Rename nothing."""


@dataclass(slots=True)
class _Peer:
    """A rank other than rank 0, whose part is written."""

    rank: int
    report: RankReport
    table: bytes
    tables: PieceTables = field(default_factory=PieceTables)

    @staticmethod
    def of(rank: int, pieces: Sequence[WrittenPiece], layout: Layout, identity: int) -> _Peer:
        """Return a rank with these pieces."""
        digests = b"".join(piece.digests for piece in pieces)
        report = RankReport(7, identity, written_bytes=_size_of(pieces), digests=digests)
        return _Peer(rank, report, encode(pieces, layout))

    def send(self, channel: StoreChannel, name: str) -> int:
        """Store the report on an attempt, and return its bytes without the digests of blocks."""
        message = self.tables.pack(self.report, self.table).to_bytes()
        channel.put(f"{key_of(name)}/report/{self.rank}", message)
        return len(message) - len(self.report.digests)

    def end(self, channel: StoreChannel, attempt: Attempt) -> None:
        """Take note of the commit of an attempt."""
        self.tables.ended(is_committed=True)
        messages.delete_reports(channel, attempt)


def _size_of(pieces: Sequence[WrittenPiece]) -> int:
    return sum(piece.hi - piece.lo for piece in pieces)


def _serve(case: str, ranks: int, pipe: Connection) -> None:
    """Stand for all ranks but rank 0: at each name from the pipe, store their reports on that attempt."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    layout_of, pieces_of = CASE_OF[case]
    layout = layout_of(ranks)
    identity = Inventory([], {}, layout).identity
    hosts, folder = Hosts.shared(ranks), CheckpointFolder(Path(tempfile.gettempdir()), Files())
    spare = [store.clone()]  # type: ignore[attr-defined]
    shared: Any = {"world_size": ranks, "timeout_s": _TIMEOUT_S, "ranks": tuple(range(ranks)), "spare": spare}
    peers = [_Peer.of(rank, pieces, layout, identity) for rank, pieces in pieces_of(ranks) if rank > 0]
    pipe.send(len(peers))
    while name := pipe.recv():
        attempt, total_bytes = Attempt(7, name, folder, layout, hosts), 0
        for peer in peers:
            channel = StoreChannel(store, peer.rank, **shared)
            total_bytes += peer.send(channel, name)
            channel.release()
        pipe.send(total_bytes)
        pipe.recv()
        start = time.perf_counter()
        for peer in peers:
            channel = StoreChannel(store, peer.rank, **shared)
            peer.end(channel, attempt)
            channel.release()
        pipe.send(time.perf_counter() - start)


def measure_commit(case: str, ranks: int) -> Figures:
    """Return the figures of the first save of a run, and of a later save of the same layout, on rank 0."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(case, ranks, other_end), daemon=True)
    process.start()
    figures: dict[str, float] = {}
    try:
        store = TCPStore("127.0.0.1", pipe.recv(), None, False, wait_for_workers=False)
        channel = StoreChannel(store, 0, world_size=ranks, timeout_s=_TIMEOUT_S)
        layout_of, pieces_of = CASE_OF[case]
        layout, tables = layout_of(ranks), PieceTables()
        pieces = next(parts for rank, parts in pieces_of(ranks) if rank == 0)
        pipe.recv()
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1, _SAVES + 1):
                name = f"scale-{number}"
                attempt = Attempt(7, name, CheckpointFolder(Path(folder), Files()), layout, Hosts.shared(ranks))
                pipe.send(name)
                message_bytes = pipe.recv()
                steps = StepsInMemory(attempt, pieces)
                when = "first" if number == 1 else "later"
                seconds = _commit(channel, attempt, steps, tables, f"scale-{number - 1}")
                figures |= {f"{when} {what}": value for what, value in seconds.items()}
                figures[f"{when} B/rank"] = message_bytes / max(1, ranks - 1)
                pipe.send(name)
                figures[f"{when} end of peers s"] = pipe.recv()
                figures["manifest MB"] = steps.manifest_bytes / 1e6
    finally:
        pipe.send("")
        process.join(_TIMEOUT_S)
    return figures


def measure_tiling(ranks: int) -> Figures:
    """Return what the check of the tables of a first save takes, in memory."""
    layout = rows_layout(ranks)
    tables = [encode(pieces, layout) for _, pieces in rows(ranks)]
    start, start_cpu = time.perf_counter(), time.thread_time()
    Tiling.of(layout, tables)
    return {"s": time.perf_counter() - start, "CPU s": time.thread_time() - start_cpu}


def _commit(
    channel: StoreChannel, attempt: Attempt, steps: StepsInMemory, tables: PieceTables, earlier: str
) -> Figures:
    """Run rank 0's side of a commit, and delete the messages of the attempt before."""
    shared = SharedCommitState(0, channel.ranks, attempt.hosts.leaders)
    with Pauses() as pauses:
        start, start_cpu = time.perf_counter(), time.thread_time()
        TwoPhaseCommit(channel, attempt, shared, steps, tables).run()
        end = time.perf_counter()
        messages.delete_messages(channel, earlier)
        figures = {
            "commit s": end - start,
            "delete s": time.perf_counter() - end,
            "CPU s": time.thread_time() - start_cpu,
        }
    return figures | {"pause ms": pauses.longest_s * 1e3}


MEASURES: Mapping[str, Measure] = {
    "commit": Measure(lambda ranks: measure_commit("rows", ranks), (256, 1024, 4096, 16384), "ranks, 8 pieces each"),
    "405b": Measure(
        lambda ranks: measure_commit("405b", ranks),
        (128, 512, 2048, 8192),
        "ranks, LLaMA-3 405B at tp 8, pp 16, ZeRO 3",
    ),
    "tiling": Measure(measure_tiling, (256, 1024, 4096, 16384), "ranks, 8 pieces each"),
    "start": Measure(scale_start.measure, (256, 1024, 4096, 16384), "ranks, 8 a host"),
    "local": Measure(scale_local.measure, (4, 8, 16, 32), "hosts, 64 pieces each"),
}


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the logarithms of positive values over those of the sizes; NaN if any value is 0."""
    if len(sizes) < 2 or min(values) <= 0:
        return math.nan
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def table(name: str, measure: Measure, by_size: Mapping[int, Figures]) -> str:
    """Return the figures of a measurement as text, with the exponent with which each grows."""
    sizes = list(by_size)
    names = dict.fromkeys(itertools.chain.from_iterable(by_size.values()))
    body = [
        (figure, *(f"{by_size[size][figure]:,.4g}" for size in sizes), f"{exponent(sizes, values):.2f}")
        for figure in names
        for values in [[by_size[size][figure] for size in sizes]]
    ]
    header = (f"{name}: {measure.unit}", *(f"{size:,}" for size in sizes), "exponent")
    return "\n".join(format_table([header, *body], align="<" + ">" * (len(sizes) + 1)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table for each measurement; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.scale", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; all by default")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="the largest size to measure")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each measurement")
    options = parser.parse_args(arguments)
    if unknown := set(options.measures) - MEASURES.keys():
        parser.error(f"no measurement is called {' or '.join(sorted(unknown))}")
    print("\n".join(describe(Path(tempfile.gettempdir()))), flush=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the trainer, and so is the exemption of modules from collections
    gc.freeze()
    for name in options.measures or MEASURES:
        measure = MEASURES[name]
        by_size: dict[int, Figures] = {}
        for size in measure.sizes:
            if size <= options.most:
                by_size[size] = measure.run(size)
                print(f"{name} {size}: {json.dumps(by_size[size])}", file=sys.stderr, flush=True)
        print(json.dumps({name: by_size}) if options.json else f"\n{table(name, measure, by_size)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
