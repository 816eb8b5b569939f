"""How tokens are chosen and when a text ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.profiles import examples
from trainer.generate.sampling import Sampling, choose, continue_with

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.9, -torch.inf])


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose(LOGITS, Sampling(), number=3) == 1


@examples(100)
@given(seed=st.integers(0, 2**63), number=st.integers(0, 10_000), top_k=st.integers(0, 6), hot=st.floats(0.01, 50))
def test_a_choice_is_a_function_of_seed_and_number(seed: int, number: int, top_k: int, hot: float) -> None:
    before = torch.random.get_rng_state()
    sampling = Sampling(temperature=hot, top_k=top_k, seed=seed)
    found = choose(LOGITS, sampling, number=number)
    assert found == choose(LOGITS, sampling, number=number)
    assert LOGITS[found] > -torch.inf
    if top_k:
        assert found in LOGITS.topk(min(top_k, 4)).indices
    assert torch.equal(torch.random.get_rng_state(), before)


def test_tokens_are_drawn_as_often_as_their_shares_say() -> None:
    count = 20_000
    found = Counter(choose(LOGITS, Sampling(temperature=0.7, seed=5), number=number) for number in range(count))
    for token, share in enumerate((LOGITS.double() / 0.7).softmax(-1).tolist()):
        # Five standard deviations of a binomial distribution.
        assert abs(found[token] - count * share) <= 5 * (count * share * (1 - share)) ** 0.5


def test_every_seed_draws_another_text() -> None:
    texts = {
        tuple(choose(LOGITS, Sampling(temperature=1.0, seed=seed), number=number) for number in range(30))
        for seed in range(20)
    }
    assert len(texts) == 20


class Counting(nn.Module):
    """A model whose likeliest next token is the last one and 1."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=2, vocab_size=100, end_tokens=(end, 98))
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        assert window.shape[1] <= 2
        return nn.functional.one_hot(window + 1, 101).float()


@pytest.mark.parametrize(("end", "expected"), [(6, [4, 5, 6]), (99, [4, 5, 6, 7, 8]), (4, [4])])
def test_a_text_ends_with_its_end_or_its_length(end: int, expected: list[int]) -> None:
    model: Any = Counting(end)
    assert continue_with(model, [1, 3], Sampling(), max_new_tokens=5) == expected
