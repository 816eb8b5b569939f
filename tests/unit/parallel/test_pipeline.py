"""Which layers a pipeline stage holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.pipeline import divide_layers


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
