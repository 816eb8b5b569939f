"""What loads at other topologies read: `python -m scripts.bench.reads [CASE ...]`.

A checkpoint and the ranks that load it are planned for a model's real shapes, with the ranks simulated as in
`train.dry_run`; no byte of a tensor moves. A block has one digest, so a load that needs a part of it reads all of it.
A host has eight ranks. Its factor `first` is the bytes of the distinct blocks that its ranks read, by the bytes that
they need together: what comes from the file system. `all` counts a block for each rank that reads it: the later ones
take it from the page cache. The case `cache` reads a file twice, the first time after it was dropped from the page
cache, and counts what came from the device.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.format import manifest
from reprise.format.manifest import TensorEntry, block_ranges
from reprise.layout import (
    BLOCK_BYTES,
    Box,
    Layout,
    TensorKind,
    WrittenPiece,
    build_layout,
    image,
    in_bytes,
    intersect,
    relative,
    whole,
)
from scripts.bench.planning import as_if_written, pieces_of_ranks
from trainer.commands.arguments import existing_folder
from trainer.config.compose import compose
from trainer.config.derived import topology_of
from trainer.config.schema import Config
from trainer.run.dry_run import boxes_at, simulate
from trainer.run.state import checkpoint_specs

HOST_RANKS = 8
_TP, _PP, _ZERO = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size", "parallel.zero_stage"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A topology: the number of ranks, and the sizes of the axes beside dp."""

    ranks: int
    tp: int
    pp: int
    zero: int

    def __str__(self) -> str:
        return f"dp {self.ranks // self.tp // self.pp}, tp {self.tp}, pp {self.pp}, ZeRO {self.zero}"

    def config(self, model: str) -> Config:
        """Return the configuration of a model at this topology."""
        return compose([f"model={model}", f"{_TP}={self.tp}", f"{_PP}={self.pp}", f"{_ZERO}={self.zero}"])


# The model, the topology of the save, and those of the loads.
CASES: Mapping[str, tuple[str, Sizes, Sequence[Sizes]]] = {
    "tiny": ("gpt2_tiny", Sizes(8, 2, 2, 3), [Sizes(8, 2, 2, 3), Sizes(8, 1, 1, 0), Sizes(4, 2, 1, 1)]),
    "8b": (
        "llama3_8b",
        Sizes(64, 8, 1, 3),
        [Sizes(64, 8, 1, 3), Sizes(32, 8, 1, 3), Sizes(64, 4, 1, 3), Sizes(64, 1, 1, 3), Sizes(16, 1, 1, 0)],
    ),
    "405b": (
        "llama3_405b",
        Sizes(256, 8, 16, 3),
        [Sizes(256, 8, 16, 3), Sizes(128, 8, 16, 3), Sizes(256, 8, 8, 3)],
    ),
}


@dataclass(slots=True)
class HostReads:
    """Bytes that the ranks of a host need together, read together, and read when each is counted alone."""

    needed: int = 0
    distinct: int = 0
    total: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the named cases, print a table of each and return 0."""
    parser = argparse.ArgumentParser(prog="bench_reads", description=__doc__)
    names = [*CASES, "cache"]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)} (all but tiny)")
    parser.add_argument("--folder", type=existing_folder, default=Path(), help="of the file that `cache` reads")
    options = parser.parse_args(arguments)
    if unknown := {*options.cases} - {*names}:
        parser.error(f"no case is named {' or '.join(sorted(unknown))}")
    for case in options.cases or [name for name in names if name != "tiny"]:
        if case == "cache":
            print("\n".join(read_twice(options.folder)))
            continue
        model, saved, loads = CASES[case]
        print(f"{model}, saved at {saved}; GB that a mean host needs, the largest factors of a host:", flush=True)
        for row in rows(model, saved, loads):
            print("  ".join(row), flush=True)
    return 0


def read_twice(folder: Path, *, total_bytes: int = 1 << 28) -> list[str]:
    """Read a file in a folder twice, and return a line for each: the bytes of the device, and the seconds of CPU."""
    lines, buffer = list[str](), memoryview(bytearray(BLOCK_BYTES))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(0, total_bytes, BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for name in ("first", "second"):
            device, cpu = _device_bytes(), time.process_time()
            for offset in range(0, total_bytes, BLOCK_BYTES):
                os.preadv(file.fileno(), [buffer], offset)
            cpu_s = (time.process_time() - cpu) * 1e9 / total_bytes
            share = (_device_bytes() - device) / total_bytes
            lines.append(f"{name} read: {share:.3f} of the bytes from the device, {cpu_s:.2f} s of CPU a GB")
    return lines


def _device_bytes() -> int:
    """Return the bytes that this process has had fetched from devices (proc(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def rows(model: str, saved: Sizes, loads: Sequence[Sizes]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each load: bytes of a mean host, and the largest factors of a host."""
    config = saved.config(model)
    layout = build_layout(list(checkpoint_specs(config.model, config.optimizer.name)))
    entries = _entries(config, saved, layout)
    for sizes in loads:
        hosts = read_by_hosts(sizes.config(model), sizes, layout, entries)
        mean = sum(host.needed for host in hosts) / len(hosts)
        first = max(host.distinct / host.needed for host in hosts)
        every = max(host.total / host.needed for host in hosts)
        yield str(sizes), f"needs {mean / 1e9:.3f}", f"first {first:.3f}", f"all {every:.3f}"


def _entries(config: Config, saved: Sizes, layout: Layout) -> dict[str, TensorEntry]:
    """Return the manifest's entries of the parameters; those of the moments are cut alike."""
    pieces = [
        as_if_written(piece)
        for _, plan in pieces_of_ranks(config, topology_of(config, saved.ranks), layout)
        for piece in plan
        if layout.places[piece.name].spec.kind is TensorKind.MODEL
    ]
    return manifest.tile(Layout((), {piece.name: layout.places[piece.name] for piece in pieces}), pieces)


def _boxes(config: Config, sizes: Sizes) -> Iterator[tuple[int, dict[str, Box]]]:
    """Yield every rank with the boxes of its parameters."""
    for simulated in simulate(config, topology_of(config, sizes.ranks)):
        for dp, ranks in enumerate(simulated.grid.ranks):
            for tp, rank in enumerate(ranks):
                parts = [boxes_at(part, simulated.grid, dp=dp, tp=tp) for part in simulated.parts]
                yield int(rank), {name: box for part in parts for name, (box, _) in part.items()}


def read_by_hosts(config: Config, sizes: Sizes, layout: Layout, entries: Mapping[str, TensorEntry]) -> list[HostReads]:
    """Return what each host reads of the parameters in a load at a topology."""
    hosts = defaultdict[int, HostReads](HostReads)
    boxes_seen, blocks_seen = set[tuple[int, str, Box]](), set[tuple[int, str, int, int]]()
    blocks_of = dict[tuple[str, Box], list[tuple[int, int, int]]]()  # replicas read the same
    for rank, boxes in _boxes(config, sizes):
        number = rank // HOST_RANKS
        host = hosts[number]
        for name, entry in entries.items():
            if name not in boxes:
                continue
            spec = layout.places[name].spec
            box = intersect(boxes[name], whole(spec.view))
            if box.numel and (number, name, box) not in boxes_seen:
                boxes_seen.add((number, name, box))
                host.needed += box.numel * spec.dtype.itemsize
            if (name, box) not in blocks_of:
                blocks_of[name, box] = [
                    (piece_number, lo, hi)
                    for piece_number, piece in entry.pieces_in(box, spec.dtype.itemsize)
                    for lo, hi in blocks_read(piece, box, spec.dtype.itemsize)
                ]
            for piece_number, lo, hi in blocks_of[name, box]:
                host.total += hi - lo
                if (number, name, piece_number, lo) not in blocks_seen:
                    blocks_seen.add((number, name, piece_number, lo))
                    host.distinct += hi - lo
    return list(hosts.values())


def blocks_read(piece: WrittenPiece, box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Return the bytes of the blocks of a piece that a load of a box reads."""
    of_piece = in_bytes(piece.box, itemsize)
    part = image(relative(intersect(of_piece, in_bytes(box, itemsize)), of_piece), of_piece.shape, 1)
    return block_ranges(piece.lo, piece.hi, begin=part.start, end=part.start + part.extent)


if __name__ == "__main__":
    sys.exit(main())
