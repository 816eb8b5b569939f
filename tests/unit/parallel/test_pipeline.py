"""Which layers a pipeline stage holds, and what a schedule gets and leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.documents import WindowForm
from trainer.parallel.pipeline import Pipeline, divide_layers


@given(st.integers(1, 20), st.integers(0, 200))
def test_layers_are_dealt_out_in_order_and_evenly(stages: int, n_layer: int) -> None:
    shares = divide_layers(n_layer, stages)
    assert len(shares) == stages
    assert [layer for share in shares for layer in share] == list(range(n_layer))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_stages_in_the_middle_hold_more_than_the_ends_do() -> None:
    # LLaMA-3 405B: both ends have a table of 128256 rows too, two thirds of a layer.
    assert [len(share) for share in divide_layers(126, 16)] == [7, *[8] * 14, 7]
    assert [len(share) for share in divide_layers(5, 2)] == [3, 2]
    assert [len(share) for share in divide_layers(5, 4)] == [1, 2, 1, 1]


def test_a_schedule_gets_tokens_without_gaps() -> None:
    """torch 2.11 compares their strides with those of the input that a stage was made with."""
    calls: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, **_: Any) -> None:
        calls.append(tokens)

    first = SimpleNamespace(_form=WindowForm(False, is_padded=False), _is_first=True, _is_last=False)
    windows = torch.arange(34).view(2, 17)
    assert Pipeline._run(first, step, windows, {}) == []  # type: ignore[arg-type]
    assert calls[0].equal(windows[:, :-1])
    assert calls[0].stride() == (16, 1)


def test_an_evaluation_leaves_what_a_step_sends_gradients_of() -> None:
    """torch 2.11 prepares a stage for evaluation alone where the first batch of a size is evaluated."""
    received = torch.zeros(3)
    infos = {0: (SimpleNamespace(buffer=received), SimpleNamespace(buffer=None), SimpleNamespace())}
    pipeline = SimpleNamespace(
        _stages=[SimpleNamespace(args_recv_info=infos)],
        _schedule_of=lambda windows: SimpleNamespace(eval=None),
        _run=lambda call, windows, extra: [],
    )
    assert Pipeline.evaluate(pipeline, torch.arange(34).view(2, 17)) == []  # type: ignore[arg-type]
    assert received.requires_grad
