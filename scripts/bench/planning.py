"""Measure the planning of a save at large scale: `python -m scripts.bench.planning [CASE ...] [--json]`.

The ranks are simulated as in `train.dry_run`. Each simulated rank runs the planning code of a save, from its tensors on
`meta` to its list of pieces. Then the pieces of all ranks are combined and checked as on rank 0: they cover every byte
of every tensor exactly once. The ranks have no peers here, which shows that planning needs no message.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reprise.format import manifest
from reprise.format.manifest import DIGEST_BYTES, FileEntry, Manifest, TensorEntry, WrittenPiece, block_count
from reprise.format.report import decode, encode
from reprise.layout import Layout, build_layout, pieces_of
from reprise.live_tensors import is_dtensor
from reprise.saving.plan import Piece, plan
from trainer.config.compose import compose
from trainer.config.derived import topology_of
from trainer.config.schema import Config
from trainer.optim.adamw import build_optimizer
from trainer.parallel.topology import Topology
from trainer.run.dry_run import Simulated, boxes_at, holdings_of, simulate
from trainer.run.state import ModelPart, TrainerState, checkpoint_specs

_TP, _PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CASES: Mapping[str, tuple[int, Sequence[str]]] = {
    "gpt2_124m": (1, ["model=gpt2_124m"]),
    "llama3_8b": (64, ["model=llama3_8b", f"{_TP}=8", "parallel=zero3"]),
    "llama3_405b": (16384, ["model=llama3_405b", f"{_TP}=8", f"{_PP}=16", "parallel.zero_stage=3"]),
    "tiny": (8, ["model=gpt2_tiny", f"{_TP}=2", f"{_PP}=2", "parallel.zero_stage=3"]),
}
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a rank's planning: naming and placing its tensors, laying out the files, choosing its pieces."""

    placing: float
    layout: float
    pieces: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.placing + self.layout + self.pieces


@dataclass(slots=True)
class PlanningResult:
    """The results of a case.

    Args:
        first: the first planning of the case, including torch's first-time costs if it is the first of the process.
        slowest: the largest median among the first ranks of all pipeline stages.
        collectives: number of collectives that torch ran during the planning of the first rank of every stage.
        report_bytes: bytes of all ranks' reports to rank 0, including digests; the largest is of one rank.
        check_s: seconds for rank 0 to check that all pieces tile, and to write the manifest's text.
    """

    case: str
    ranks: int
    checkpoint_bytes: int
    tensors: int
    files: int
    first: Seconds
    slowest: Seconds
    collectives: int
    most_written: int
    mean_written: float
    pieces: int = 0
    most_pieces: int = 0
    report_bytes: int = 0
    largest_report_bytes: int = 0
    manifest_bytes: int = 0
    check_s: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named cases, print the results and return 0."""
    parser = argparse.ArgumentParser(prog="bench_planning", description="Measure how a save is planned.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all but tiny)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no case is named {' or '.join(sorted(unknown))}")
    for case in options.cases or [name for name in CASES if name != "tiny"]:
        result = measure(case)
        print(json.dumps(dataclasses.asdict(result)) if options.json else table(result), flush=True)
    return 0


def measure(case: str) -> PlanningResult:
    """Plan a save on every rank of a case, and combine the plans."""
    ranks, overrides = CASES[case]
    config = compose(overrides)
    layout = build_layout(list(checkpoint_specs(config.model, config.optimizer.name)))
    timed: list[list[Seconds]] = []
    bytes_of_ranks: list[int] = []
    entries: dict[str, TensorEntry] = {}
    result = PlanningResult(
        case,
        ranks,
        layout.total_bytes,
        len(layout.places),
        len(layout.files),
        Seconds(0, 0, 0),
        Seconds(0, 0, 0),
        0,
        0,
        0,
    )
    for simulated in simulate(config, topology_of(config, ranks)):
        state = _state_of_first_rank(config, simulated)
        rank = int(simulated.grid.ranks[0, 0])
        timed.append([time_planning(state, rank) for _ in range(_REPEATS)])
        result.collectives += count_collectives(state, rank)
        plans = [pieces for _, pieces in _pieces_of_stages(config, simulated, layout)]
        bytes_of_ranks += [sum(piece.hi - piece.lo for piece in pieces) for pieces in plans]
        entries |= _put_together(plans, layout, result)
    result.first = timed[0][0]
    result.slowest = max(
        (sorted(times, key=lambda t: t.total)[_REPEATS // 2] for times in timed), key=lambda t: t.total
    )
    result.most_written, result.mean_written = max(bytes_of_ranks), statistics.fmean(bytes_of_ranks)
    files = {f.name: FileEntry(f.total_bytes, manifest.digest_of(f.header), is_tensor_file=True) for f in layout.files}
    start = time.perf_counter()
    result.manifest_bytes = len(manifest.to_bytes(Manifest("attempt", files, entries, {})))
    result.check_s += time.perf_counter() - start
    return result


def time_planning(state: TrainerState, rank: int) -> Seconds:
    """Return the seconds from a rank's tensors to its pieces, with empty caches."""
    marks = [time.perf_counter()]
    contents = state.contents({}, with_optimizer=True)
    marks.append(time.perf_counter())
    layout = build_layout(contents.specs)
    marks.append(time.perf_counter())
    plan(contents.live, layout, rank)
    marks.append(time.perf_counter())
    return Seconds(*(end - start for start, end in itertools.pairwise(marks)))


def count_collectives(state: TrainerState, rank: int) -> int:
    """Return the number of collectives and messages that torch runs while a rank plans."""
    seen = Collectives()
    with seen:
        time_planning(state, rank)
    return seen.count


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of torch's process groups, including those that a DTensor runs internally."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operator and run it."""
        if any(isinstance(arg, torch.Tensor) and is_dtensor(arg) for arg in args):
            return NotImplemented  # DTensor dispatches again with its component operators
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def _state_of_first_rank(config: Config, simulated: Simulated) -> TrainerState:
    parts = [ModelPart(model, build_optimizer(config.model, model, config.optimizer)) for model in simulated.parts]
    return TrainerState(config.model, parts, simulated.grid)


def pieces_of_ranks(config: Config, topology: Topology, layout: Layout) -> Iterator[tuple[int, list[Piece]]]:
    """Yield every rank of a topology with its pieces, stage by stage of the pipeline."""
    for simulated in simulate(config, topology):
        yield from _pieces_of_stages(config, simulated, layout)


def _pieces_of_stages(config: Config, simulated: Simulated, layout: Layout) -> Iterator[tuple[int, list[Piece]]]:
    """Yield every rank with these stages, and its pieces."""
    for dp, row in enumerate(simulated.grid.ranks):
        for tp, rank in enumerate(row):
            boxes = [boxes_at(part, simulated.grid, dp=dp, tp=tp) for part in simulated.parts]
            yield int(rank), pieces_of(holdings_of(config, boxes, layout, simulated.grid), int(rank))


def _put_together(plans: Iterable[Sequence[Piece]], layout: Layout, result: PlanningResult) -> dict[str, TensorEntry]:
    """Check that the plans of a pipeline stage tile its tensors, and return the manifest's entries of these."""
    reports = []
    for pieces in plans:
        reported = [as_if_written(piece) for piece in pieces]
        table, digests = encode(reported, layout), b"".join(piece.digests for piece in reported)
        report_bytes = len(table) + len(digests)
        result.pieces += len(pieces)
        result.most_pieces = max(result.most_pieces, len(pieces))
        result.report_bytes += report_bytes
        result.largest_report_bytes = max(result.largest_report_bytes, report_bytes)
        reports.append((table, digests))
    start = time.perf_counter()
    pieces_of_stage = [piece for table, digests in reports for piece in decode(table, digests, layout)]
    names = {piece.name for piece in pieces_of_stage}
    stage = Layout((), {name: place for name, place in layout.places.items() if name in names})
    entries = manifest.tile(stage, pieces_of_stage)
    result.check_s += time.perf_counter() - start
    return entries


def as_if_written(piece: Piece) -> WrittenPiece:
    """Return a piece with digests of zeros."""
    return WrittenPiece(
        piece.name, piece.box, piece.lo, piece.hi, bytes(block_count(piece.hi - piece.lo) * DIGEST_BYTES)
    )


def table(result: PlanningResult) -> str:
    """Return the results as text."""
    first, slowest = result.first, result.slowest
    rows = [
        ("checkpoint", f"{result.checkpoint_bytes / 1e9:,.1f} GB, {result.tensors:,} tensors, {result.files:,} files"),
        ("planning, one rank, s", f"{slowest.total:.4f}, nothing cached; the first time {first.total:.4f}"),
        ("  placing live tensors", f"{slowest.placing:.4f}"),
        ("  layout of all files", f"{slowest.layout:.4f}"),
        ("  choosing pieces", f"{slowest.pieces:.4f}"),
        ("messages while planning", f"{result.collectives} collectives seen, no other rank there to talk to: 0 B"),
        ("written, most / mean", f"{result.most_written / result.mean_written:.4f} ({result.most_written:,} B)"),
        ("pieces", f"{result.pieces:,} in all, at most {result.most_pieces:,} of one rank; every byte once"),
        (
            "reports at commit",
            f"{result.report_bytes:,} B in all, at most {result.largest_report_bytes:,} B of one rank",
        ),
        ("rank 0's check, s", f"{result.check_s:.2f}"),
        ("manifest", f"{result.manifest_bytes:,} B"),
    ]
    return "\n".join([f"{result.case} on {result.ranks:,} ranks", *(f"  {name:<24} {text}" for name, text in rows)])


if __name__ == "__main__":
    sys.exit(main())
