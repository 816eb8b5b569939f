"""Measure what virtual tensor-parallel shards cost on one rank: `python -m scripts.bench.shards [MODEL ...]`.

Seconds of the processor of a forward and backward pass on one thread, with `parallel.invariant_tensor_ranks=M` for each
M and without. All sides take turns in one process, so that the ratios hold on a busy machine. MODEL is a preset of
`configs/model`; `--set` changes it, as in `--set model.n_layer=2`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from models.config import Stage
from models.layers import token_loss
from trainer.compare.text_table import format_table
from trainer.config.compose import compose
from trainer.parallel import virtual_shards
from trainer.parallel.shard_sums import Shards
from trainer.parallel.topology import Topology
from trainer.run.parallelize import build_stage

_SPREAD = 0.02  # of the initial weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named models, print the results and return 0."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    for model in options.models or ["gpt2_124m"]:
        sides = [_side(model, count, options) for count in (0, *options.shards)]
        seconds = measure(sides, options.rounds)
        rows = []
        for count, times in zip((0, *options.shards), seconds, strict=True):
            ratios = [a / b for a, b in zip(times, seconds[0], strict=True)]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            rows.append([str(count or "-"), f"{statistics.median(times):.3f} s", ratio])
        lines = format_table([("shards", "processor", "on / off"), *rows], align=">")
        title = f"\n{model}, {options.tokens} tokens, {options.dtype}, load {os.getloadavg()[0]:.0f}"
        print("\n".join([title, *lines]), flush=True)
    return 0


def measure(sides: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Return the seconds of the processor of each round of each side."""
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for which in range(len(sides)) if number % 2 else reversed(range(len(sides))):
            start = time.process_time()
            sides[which]()
            if number:  # after a round to warm up
                seconds[which].append(time.process_time() - start)
    return seconds


def _side(name: str, count: int, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs a model with so many shards forward and backward."""
    config = compose(
        [
            f"model={name}",
            "model.pad_vocab_multiple=128",
            f"train.seq_length={options.tokens}",
            f"train.dtype={options.dtype}",
            f"parallel.invariant_ranks={1 if count else 0}",
            f"parallel.invariant_tensor_ranks={count}",
            *options.set,
        ]
    )
    stage, topology = Stage.whole(config.model.n_layer), Topology(1, 1, 1)
    model = build_stage(config, torch.device("cpu"), stage=stage, topology=topology, mesh=None)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=_SPREAD)
    tokens = torch.randint(config.model.vocab_size, (1, options.tokens + 1))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        if count:
            loss = virtual_shards.cross_entropy(logits, targets, shards=Shards(count))
        else:
            loss = token_loss(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_shards", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="presets of configs/model (gpt2_124m)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed rounds of each side (%(default)d)")
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4], metavar="M", help="of each further side (2 4)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of the one sample (%(default)d)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides")
    return parser


if __name__ == "__main__":
    sys.exit(main())
