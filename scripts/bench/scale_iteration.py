"""Measure the host's time of an iteration's figures by ranks: `python -m scripts.bench.scale_iteration`.

The trainer's `reduce_figures` runs as in an iteration with a line of the log. In place of the collective stands the
result that equal ranks would have, this rank's message times their number; so the seconds are those of the host alone,
with a gradient of 64 elements.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import cast

import torch
from torch import nn

from reprise.channel import single_rank_channel
from trainer.data.documents import WindowForm
from trainer.launch.process_group import Cluster
from trainer.metrics.slow_ranks import RankTime
from trainer.optim.exact_sum import NormShare
from trainer.parallel.context import ParallelContext
from trainer.parallel.lanes import Lanes
from trainer.parallel.reduction import GradientReduction
from trainer.training.step import reduce_figures

RANKS = (256, 1024, 4096, 16384)
ROUNDS = 200


class EqualRanks(Cluster):
    """A rank among many with the same numbers."""

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers * self.world_size

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


@dataclass(frozen=True, slots=True)
class FigureCost:
    """A number of ranks, and the median of the host's seconds in an iteration; `exact_s` with exact sums."""

    ranks: int
    seconds: float
    exact_s: float


def rows() -> list[FigureCost]:
    """Return a row for each number of `RANKS`."""
    return [FigureCost(ranks, _seconds(ranks, is_exact=False), _seconds(ranks, is_exact=True)) for ranks in RANKS]


def one_rank(ranks: int, *, is_exact: bool) -> tuple[Cluster, ParallelContext]:
    """Return a rank among many with the same numbers, and its context with a gradient of 64 elements."""
    cluster = EqualRanks(0, ranks, torch.device("cpu"), 1, single_rank_channel(), "bench")
    parameter = nn.Parameter(torch.zeros(64))
    parameter.grad = torch.rand(64)
    context = ParallelContext(
        reduction=cast(GradientReduction, None),
        lanes=Lanes(count=ranks, micro_batches=ranks) if is_exact else None,
        needs_loss_parallel=False,
        loss=lambda logits, targets: logits,
        gather_logits=lambda logits: logits,
        pipeline=None,
        embedding_group=None,
        reports_loss=True,
        grad_norm_shares=[NormShare(parameter, 0, 1)],
        form=WindowForm(),
    )
    return cluster, context


def _seconds(ranks: int, *, is_exact: bool) -> float:
    cluster, context = one_rank(ranks, is_exact=is_exact)
    losses, times = [torch.tensor(0.1).double()], RankTime(50_000, 100)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        reduce_figures(losses, [False, False, False], context, cluster, times)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main() -> int:
    """Print the rows as lines of JSON, and return 0."""
    torch.set_num_threads(1)
    for row in rows():
        print(json.dumps({"ranks": row.ranks, "ms": row.seconds * 1e3, "exact_ms": row.exact_s * 1e3}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
