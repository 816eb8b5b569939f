"""The figures of an iteration: a rank alone has those of a message, bit by bit."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reprise.ranks import single_rank_channel
from trainer.data.documents import WindowForm
from trainer.launch.process_group import Cluster
from trainer.optim.exact_sum import NormShare
from trainer.parallel.context import ParallelContext
from trainer.parallel.lanes import Lanes
from trainer.parallel.reduction import GradientReduction
from trainer.training.step import StepResult, reduce_figures

FLAGS = (False, True, False)


class EqualRanks(Cluster):
    """A rank among many with the same numbers."""

    def reduced(self, numbers: torch.Tensor, operation: object = dist.ReduceOp.SUM) -> torch.Tensor:
        return numbers * self.world_size if operation is dist.ReduceOp.SUM else numbers


def one_rank(ranks: int, parameter: nn.Parameter, lanes: Lanes | None) -> tuple[Cluster, ParallelContext]:
    """Return a rank among many with the same numbers, and its context with a gradient."""
    cluster = EqualRanks(0, ranks, torch.device("cpu"), 1, single_rank_channel(), "test")
    context = ParallelContext(
        reduction=cast(GradientReduction, None),
        lanes=lanes,
        loss=lambda logits, targets: logits,
        loss_context=nullcontext,
        pipeline=None,
        reports_loss=True,
        grad_norm_shares=[NormShare(parameter, 0, 1)],
        form=WindowForm(),
    )
    return cluster, context


def figures(ranks: int, losses: list[float], gradient: list[float], *, is_exact: bool = False) -> StepResult:
    """Return the figures of ranks with the same numbers."""
    parameter = nn.Parameter(torch.zeros(64))
    lanes = Lanes(1, ranks * len(losses)) if is_exact else None
    cluster, context = one_rank(ranks, parameter, lanes)
    parameter.grad = torch.tensor(gradient).expand(64).clone() if len(gradient) == 1 else torch.tensor(gradient)
    values = [torch.tensor(loss).double() for loss in losses]
    return reduce_figures(values, FLAGS, context, cluster)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("losses", "gradient"),
    [
        ([3.1, 1.7, 2.0**-149], [0.1 * number - 3.0 for number in range(64)]),
        ([-0.0], [0.0]),
        ([math.inf], [math.nan]),
        ([math.nan], [3.4e38]),
        ([-math.inf, 1.0], [math.inf]),
        ([-math.inf, math.inf], [1.0]),
        ([1e30, 2.0**-149, -1e30], [1e18, 1e-18, *[1.0] * 62]),
    ],
)
def test_a_rank_alone_has_the_figures_of_a_message(losses: list[float], gradient: list[float], is_exact: bool) -> None:
    alone = figures(1, losses, gradient, is_exact=is_exact)
    of_four = figures(4, losses, gradient, is_exact=is_exact)
    assert alone.loss.hex() == of_four.loss.hex()
    assert (2 * alone.grad_norm).hex() == of_four.grad_norm.hex()
    assert [4 * count for count in alone.flags] == [*of_four.flags] == [0, 4, 0]
