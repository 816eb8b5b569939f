"""The cost of an iteration's figures by the number of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.bench import scale_iteration
from scripts.bench.scale_iteration import EqualRanks, one_rank
from trainer.metrics.slow_ranks import RankTime
from trainer.training.step import reduce_figures


def test_each_number_of_ranks_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_iteration, "ROUNDS", 1)
    assert [row.ranks for row in scale_iteration.rows()] == list(scale_iteration.RANKS)


@pytest.mark.parametrize("is_exact", [False, True])
def test_equal_ranks_have_the_mean_loss_and_the_joint_norm(is_exact: bool) -> None:
    cluster, context = one_rank(16384, is_exact=is_exact)
    losses = [torch.tensor(0.1).double()]
    figures = reduce_figures(losses, [False, True], context, cluster, RankTime(50_000, 100))
    assert isinstance(cluster, EqualRanks)
    assert figures.loss == float(losses[0])
    (parameter,) = context.grad_norm_parameters
    assert parameter.grad is not None
    norm = float(torch.linalg.vector_norm(parameter.grad.double()))
    assert figures.grad_norm == pytest.approx(norm * math.sqrt(16384), rel=1e-6)
    assert figures.flags == (0, 16384)
    assert figures.slowest is None
