"""What grows with the ranks of a run: the commit of a save, and the agreements of a start, on rank 0.

Rank 0 runs the real code in this process. A second process runs it for all other ranks in turn, each up to the first
message of another rank, and serves the store on 127.0.0.1, as the agent of a launcher does. The disk is left out.
A thread that wakes every millisecond takes the place of training: its longest delay is the longest pause.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reprise.commit import find_hosts
from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.joint_plan import KnownPlans, encode
from reprise.commit.messages import Message
from reprise.commit.protocol import TwoPhaseCommit
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import LaunchError, TrainerError
from reprise.format import Layout, StoredDtype, TensorKind, TensorSpec, build_layout, image, intersect, whole
from reprise.format.box import Box
from reprise.format.manifest import DIGEST_BYTES, WrittenPiece, block_count
from reprise.ranks import StoreChannel
from reprise.saving import Holding, pieces_of
from reprise.storage import CheckpointFolder, Files
from reprise.tensors import Contents, placed_box
from scripts.bench.harness import Figures, apart, report, take_turns
from scripts.faults.ranks import free_port
from trainer.config.compose import compose
from trainer.launch.process_group import SWITCH_INTERVAL_S
from trainer.memory.dry_run import Simulated, simulate
from trainer.optim.adamw import stored_names
from trainer.run.state import checkpoint_specs

_TIMEOUT_S, _ITERATION = 600.0, 7
_ROW_ITEMS, _TENSORS = 256, 8
_RANKS_PER_HOST = 8
_LLAMA = ("model=llama3_405b", "parallel.tensor_model_parallel_size=8", "parallel.pipeline_model_parallel_size=16")

RankPieces = Iterator[tuple[int, list[WrittenPiece]]]


class _PeerChannel(StoreChannel):
    """The channel of a rank that stores its messages and waits for nothing."""

    sent_bytes = 0

    def put(self, key: str, data: bytes, *, is_first: bool = True) -> list[str]:
        _PeerChannel.sent_bytes += len(data)
        return super().put(key, data, is_first=is_first)

    def read_all(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        if key.endswith("/opened"):
            return [Message(number=_ITERATION).to_bytes()]
        raise LaunchError(f"{key} of {[*ranks]} is not there")


@dataclass(slots=True, kw_only=True)
class _Commit(TwoPhaseCommit):
    """A rank's side of a save, which the disk has no part in."""

    report: Message

    def begin(self) -> None:
        """Require no room."""

    def write(self) -> Message:
        """Return the pieces as written."""
        return self.report

    def _prepare(self) -> None:
        self._json_files()

    def _rename(self) -> None:
        return


class _Saves:
    """A rank's side of the saves of a layout."""

    def __init__(self, layout: Layout, pieces: Sequence[WrittenPiece]) -> None:
        self._layout, self._table, self._plans = layout, encode(pieces, layout), KnownPlans()
        written_bytes = sum(piece.hi - piece.lo for piece in pieces)
        digests = b"".join(piece.digests for piece in pieces)
        self._report = Message(number=written_bytes, payload=digests)

    def run(self, name: str, channel: StoreChannel) -> None:
        """Commit an attempt; a peer's ends where it would wait, as if it were committed."""
        folder = CheckpointFolder(Path(tempfile.gettempdir()), Files())
        attempt = Attempt(_ITERATION, name, folder, self._layout, Hosts.of(channel.ranks))
        shared = SharedAttempt(name, channel, attempt.hosts)
        commit = _Commit(
            attempt=attempt,
            contents=Contents((), ()),
            table=self._table,
            replicas=None,
            channel=channel,
            shared=shared,
            plans=self._plans,
            report=self._report,
        )
        try:
            commit.commit()
        except TrainerError:
            if not isinstance(channel, _PeerChannel):
                raise
        if not isinstance(channel, _PeerChannel):
            shared.delete_read()


def _rows(ranks: int) -> tuple[Layout, RankPieces]:
    """Return a layout of a few tensors with a row for each rank, and the ranks' pieces."""
    shape, size = (ranks, _ROW_ITEMS), _ROW_ITEMS * 4
    names = [f"layers.{number}.weight" for number in range(_TENSORS)]
    layout = build_layout([TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape) for name in names])
    boxes = ((rank, Box((rank, 0), (1, _ROW_ITEMS))) for rank in range(ranks))
    return layout, (
        (rank, [WrittenPiece(name, box, 0, size, bytes(DIGEST_BYTES)) for name in names]) for rank, box in boxes
    )


def _llama(ranks: int) -> tuple[Layout, RankPieces]:
    """Return the training state of LLaMA-3 405B with tp 8, pp 16 and ZeRO stage 3, and the ranks' pieces."""
    config = compose([*_LLAMA, "parallel.zero_stage=3"])
    layout = build_layout(list(checkpoint_specs(config.model, config.optimizer)))

    def pieces() -> RankPieces:
        for simulated in simulate(config, config.parallel.topology(ranks)):
            for dp, row in enumerate(simulated.grid.ranks):
                for tp, rank in enumerate(row):
                    planned = pieces_of([*_holdings(simulated, layout, {"dp": dp, "tp": tp})], int(rank))
                    yield int(rank), [_zeros(piece.name, piece.box, piece.lo, piece.hi) for piece in planned]

    return layout, pieces()


def _holdings(simulated: Simulated, layout: Layout, coordinate: Mapping[str, int]) -> Iterator[Holding]:
    """Yield what the rank at a coordinate of its stages would save of a model without tied parameters."""
    for part in simulated.parts:
        placed = {name: placed_box(name, p, simulated.grid, coordinate) for p, name in stored_names(part).items()}
        for name, place in layout.places.items():
            spec = place.spec
            parameter = name if spec.kind is TensorKind.MODEL else name.partition(".")[2]
            if parameter in placed and spec.shape:
                box, replicas = placed[parameter]
                yield Holding(place, spec.image(intersect(box, whole(spec.view))), replicas)
            elif parameter in placed:
                yield Holding(place, image(whole(()), (), 4), simulated.grid.holders({}))


def _zeros(name: str, box: Box, lo: int, hi: int) -> WrittenPiece:
    return WrittenPiece(name, box, lo, hi, bytes(block_count(hi - lo) * DIGEST_BYTES))


_CASES = {"commit": _rows, "405b": _llama}
Call = Callable[[StoreChannel], object]


def _calls(measure: str, ranks: int, *, is_first: bool) -> Iterator[tuple[int, Mapping[str, Call]]]:
    """Yield the calls of rank 0, or of all others, by name."""
    if measure == "start":
        for rank in range(1 if is_first else ranks):
            first = rank // _RANKS_PER_HOST * _RANKS_PER_HOST
            yield (
                rank,
                {
                    "hosts": partial(_find_hosts, range(first, first + _RANKS_PER_HOST)),
                    "agreement": lambda channel: channel.agree("agree", None),
                    "answers": lambda channel: channel.gather("answers", b"false"),
                },
            )
        return
    layout, pieces = _CASES[measure](ranks)
    for rank, parts in pieces:
        saves = _Saves(layout, parts)
        yield rank, {name: partial(saves.run, name) for name in ("first", "later")}
        if is_first:
            return


def _find_hosts(hosts: Sequence[int], channel: StoreChannel) -> object:
    return find_hosts(channel, hosts, "k")


def _peers(measure: str, ranks: int, port: int) -> Callable[[str], float]:
    """Serve the store, and return what makes a call of all ranks but rank 0: it returns the bytes that one sends."""
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    peers = dict(_calls(measure, ranks, is_first=False))

    def call(name: str) -> float:
        before = _PeerChannel.sent_bytes
        for rank in range(1, ranks):
            channel = _PeerChannel(store, rank, world_size=ranks, timeout_s=_TIMEOUT_S)
            with suppress(LaunchError):
                peers[rank][name](channel)
        return (_PeerChannel.sent_bytes - before) / (ranks - 1)

    return call


def measure_ranks(measure: str, ranks: int) -> Figures:
    """Return the figures of a measure at a number of ranks."""
    figures, port = Figures(), free_port()
    with apart(_peers, measure, ranks, port) as call_peers:
        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        channel = StoreChannel(store, 0, world_size=ranks, timeout_s=_TIMEOUT_S)
        (_, calls) = next(_calls(measure, ranks, is_first=True))
        for name, call in calls.items():
            figures[f"{name}, B/rank"] = call_peers(name)
            with _pauses() as pauses:
                start, start_cpu = time.perf_counter(), time.thread_time()
                call(channel)
                seconds = {"s": time.perf_counter() - start, "CPU s": time.thread_time() - start_cpu}
            figures |= {f"{name}, {unit}": value for unit, value in seconds.items()}
            figures[f"{name}, pause ms"] = 1e3 * max(pauses)
    return figures


@contextmanager
def _pauses() -> Iterator[list[float]]:
    """Yield the seconds for which a thread that asks to wake every millisecond is kept waiting."""
    delays, is_over = [0.0], threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            start = time.perf_counter()
            time.sleep(0.001)
            delays.append(time.perf_counter() - start - 0.001)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield delays
    finally:
        is_over.set()
        thread.join()


# The measures, and their numbers of ranks.
MEASURES = {
    "commit": (256, 1024, 4096, 16384),
    "405b": (128, 512, 2048, 8192),
    "start": (256, 1024, 4096, 16384),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; all by default")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="the largest number of ranks")


def measure(options: argparse.Namespace, _: Path) -> list[str]:
    """Return a table for each measure."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the trainer, and so is the exemption of modules from collections
    gc.freeze()
    lines = []
    for name in options.measures or MEASURES:
        sizes = [size for size in MEASURES[name] if size <= options.most]
        sides = {f"{name}, {size:,} ranks": partial(measure_ranks, name, size) for size in sizes}
        lines += ["", *report(take_turns(sides, 1))]
    return lines
