"""Measure what `parallel.invariant_ranks` costs: `python -m scripts.bench.invariant [SIZE ...] [--rounds N]`.

With `--shards M ...`, what `parallel.invariant_tensor_ranks` costs beside it, on one rank and on M cut ones.

Runs with and without the key take turns: a round times some iterations of each, while the ranks of the other wait. The
tables give the ratio of the times, the bytes that a rank sends to reduce gradients, and the growth of the peak memory
of rank 0 beside that in `train.dry_run`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import default_rng

from reprise.files import FILE_SYSTEM
from reprise.live_tensors import local_of
from scripts.bench.gpt2 import gpt2_config
from scripts.bench.machine import describe
from scripts.faults.ranks import free_port
from trainer.compare.text_table import format_table
from trainer.config.checkpoint import CheckpointSection
from trainer.config.derived import topology_of
from trainer.config.logging import LoggingSection
from trainer.config.optimizer import OptimizerSection
from trainer.config.parallel import ParallelSection
from trainer.config.run import RunSection
from trainer.config.schema import Config
from trainer.config.train import Dtype, TrainSection
from trainer.data.section import DataKind, DataSection
from trainer.data.token_file import write_token_file
from trainer.launch import process_group as launch
from trainer.parallel import halving
from trainer.run.build import build
from trainer.run.dry_run import working_bytes_of
from trainer.run.inputs import open_inputs
from trainer.run.saves import build_saves
from trainer.training.loop import iterate

LANES = 8
_SPREAD = 0.02  # of the initial weights


@dataclass(frozen=True, slots=True)
class Workload:
    """A GPT-2 and its micro batches; a round times `steps` iterations of `LANES` micro batches."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    micro_batch_size: int
    seq_length: int
    steps: int


SIZES: Mapping[str, Workload] = {
    "small": Workload(4, 4, 256, 2048, micro_batch_size=4, seq_length=128, steps=4),
    "gpt2_124m": Workload(12, 12, 768, 50257, micro_batch_size=1, seq_length=512, steps=1),
    "tiny": Workload(2, 2, 16, 64, micro_batch_size=1, seq_length=16, steps=1),
}


@dataclass(frozen=True, slots=True)
class MeasuredTopology:
    """A topology, with the virtual shards of its second side; both sides have them in turn, or the lanes if 0."""

    ranks: int
    zero_stage: int = 0
    tp: int = 1
    shards: int = 0

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """Return the lanes and the virtual shards of both sides."""
        return ((LANES, 0), (LANES, self.shards)) if self.shards else ((0, 0), (LANES, 0))


WAYS = (MeasuredTopology(1), MeasuredTopology(2), MeasuredTopology(2, 1), MeasuredTopology(2, 3))


@dataclass(frozen=True, slots=True)
class Ended:
    """The results of the rounds of a side: seconds per iteration, bytes sent per iteration, peak bytes."""

    seconds: list[float]
    sent_bytes: int
    least_bytes: int
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named sizes, print the results and return 0."""
    options = _parser().parse_args(arguments)
    print("\n".join(describe(Path(tempfile.gettempdir()))))
    ways = [
        way
        for count in options.shards
        for way in (MeasuredTopology(1, shards=count), MeasuredTopology(count, tp=count, shards=count))
    ]
    header = (
        "ranks",
        "tp",
        "shards",
        "zero_stage",
        "off",
        "on",
        "on / off",
        "sent",
        "of reduce-scatter",
        "memory",
        "dry run",
    )
    for name in options.sizes or ["small", "gpt2_124m"]:
        rows = [_row(SIZES[name], way, options) for way in ways or WAYS]
        lines = format_table([header, *rows], align=">")
        print("\n".join([f"\n{name}, {options.dtype}, {options.threads} threads a rank", *lines]), flush=True)
    return 0


def _row(size: Workload, way: MeasuredTopology, options: argparse.Namespace) -> list[str]:
    off, on = measure(size, way, options)
    ratios = [b / a for a, b in zip(off.seconds, on.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    sides = [config_of(size, way, options, side=side, folder=Path()) for side in way.sides]
    least, most = (working_bytes_of(config, topology_of(config, way.ranks)) for config in sides)
    return [
        str(way.ranks),
        str(way.tp),
        str(way.shards or "-"),
        str(way.zero_stage),
        f"{statistics.median(off.seconds):.3f} s",
        f"{statistics.median(on.seconds):.3f} s",
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        f"{on.sent_bytes / 1e6:.1f} MB",
        "-" if way.ranks == way.tp else f"{on.sent_bytes / on.least_bytes:.4f}",
        f"{(on.peak_bytes - off.peak_bytes) / 1e6:+.0f} MB",
        f"{(most - least) / 1e6:+.0f} MB",
    ]


def measure(size: Workload, way: MeasuredTopology, options: argparse.Namespace) -> tuple[Ended, Ended]:
    """Return the figures without and with the key."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        tokens = default_rng(1).integers(size.vocab_size, size=1 << 16)
        write_token_file(folder / "train.bin", [tokens], dtype=np.uint32)
        configs = [config_of(size, way, options, side=side, folder=folder) for side in way.sides]
        sides = [ending.enter_context(_started(config, way.ranks, size.steps)) for config in configs]
        for side in sides:
            side.run()  # warm up
        seconds: list[list[float]] = [[], []]
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                seconds[which].append(sides[which].run() / size.steps)
        off, on = (replace(side.end(), seconds=times) for side, times in zip(sides, seconds, strict=True))
    return off, on


def config_of(
    size: Workload, way: MeasuredTopology, options: argparse.Namespace, *, side: tuple[int, int], folder: Path
) -> Config:
    """Return the configuration of a side, given by its lanes and virtual shards."""
    lanes, shards = side
    model = gpt2_config(size.n_layer, size.n_head, size.n_embd, size.vocab_size, pad_vocab_multiple=128)
    train = TrainSection(
        dtype=Dtype(options.dtype),
        micro_batch_size=size.micro_batch_size,
        global_batch_size=LANES * size.micro_batch_size,
        seq_length=options.seq_length or size.seq_length,
        threads=options.threads,
        eval_interval=0,
    )
    return Config(
        model,
        run=RunSection(dir=str(folder / f"run{lanes}-{shards}")),
        data=DataSection(kind=DataKind.token_file, train=str(folder / "train.bin")),
        train=train,
        optimizer=OptimizerSection(lr=1e-3),
        parallel=ParallelSection(
            tensor_model_parallel_size=way.tp,
            zero_stage=way.zero_stage,
            invariant_ranks=lanes,
            invariant_tensor_ranks=shards,
        ),
        checkpoint=CheckpointSection(save=None),
        logging=LoggingSection(tensorboard=False),
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """The ranks of a side, each with a pipe for requests of rounds."""

    pipes: Sequence[Connection]

    def run(self) -> float:
        """Run the iterations of a round and return their seconds on the slowest rank."""
        for pipe in self.pipes:
            pipe.send(True)
        return max(self._hear(pipe) for pipe in self.pipes)

    def end(self) -> Ended:
        """Return the figures of rank 0."""
        for pipe in self.pipes:
            pipe.send(False)
        first, *_ = [Ended([], *pipe.recv()) for pipe in self.pipes]
        return first

    def _hear(self, pipe: Connection) -> float:
        try:
            return float(pipe.recv())
        except (EOFError, ConnectionError):
            raise SystemExit("bench.invariant: a rank ended") from None


@contextmanager
def _started(config: Config, ranks: int, steps: int) -> Iterator[_Side]:
    """Start the ranks of a side, and end them on exit."""
    context = multiprocessing.get_context("spawn")
    port, pipes, processes = free_port(), [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        variables = dict(zip(names, map(str, (rank, rank, ranks, ranks, port)), strict=True))
        variables = variables | {"MASTER_ADDR": "127.0.0.1"} if ranks > 1 else {}
        process = context.Process(target=_serve, args=(sender, config, variables, steps), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        yield _Side(pipes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(pipe: Connection, config: Config, variables: Mapping[str, str], steps: int) -> None:
    """Train `steps` iterations at each request from the pipe; at the last, send the figures."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    cluster = launch.start("cpu", deterministic=False, threads=config.train.threads, variables=variables)
    sent_bytes = 0

    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        nonlocal sent_bytes
        sent_bytes += outgoing.nbytes
        send_and_receive(outgoing, incoming, peer, group)

    send_and_receive, halving._exchange = halving._exchange, exchange
    run = build(config, cluster, inputs=open_inputs(config, cluster), saves=build_saves(config, cluster, FILE_SYSTEM))
    for tensor in run.state.shards(with_optimizer=False):
        tensor.local.normal_(std=_SPREAD)
    iterations = 0
    with suppress(EOFError, ConnectionError):
        while pipe.recv():
            start = time.perf_counter()
            for _ in range(steps):
                iterate(run)
            iterations += steps
            pipe.send(time.perf_counter() - start)
        lanes = LANES // cluster.world_size if config.parallel.zero_stage >= 2 else 1
        gradient_bytes = 4 * sum(math.prod(p.shape) for p in run.state.parameters())
        assert all(bool(torch.isfinite(local_of(p)).all()) for p in run.state.parameters())
        least = lanes * gradient_bytes * (cluster.world_size - 1) // cluster.world_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        pipe.send((sent_bytes // max(1, iterations), least, peak))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_invariant", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("sizes", nargs="*", choices=list(SIZES), metavar="SIZE", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed rounds of each side (%(default)d)")
    parser.add_argument("--shards", type=int, nargs="*", default=[], metavar="M", help="virtual shards to measure")
    parser.add_argument("--seq-length", type=int, default=0, metavar="N", help="tokens of a micro batch's sample")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank (%(default)d)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
