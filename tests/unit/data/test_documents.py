"""Attention and positions within documents: nothing crosses a border, and each document is as if alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.build import build_model
from models.config import Stage
from models.network import Model
from tests.unit.model_samples import FAMILIES, fill, random_values
from trainer.data.documents import DOCUMENT_START, ModelInputs, WindowForm

BORDERS = (0, 13, 14, 30)  # of documents in the first window; the second is one document
LENGTH = 40


def model_of(family: str) -> Model:
    torch.manual_seed(1)
    config = FAMILIES[family]
    model = build_model(config, stage=Stage.whole(config.n_layer), compute_dtype=torch.float32)
    return fill(model, random_values(config))


def windows() -> Tensor:
    return torch.randint(257, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))


def marked(tokens: Tensor) -> ModelInputs:
    found = tokens.clone()
    found[0, list(BORDERS)] += DOCUMENT_START
    return WindowForm(masks_documents=True).split(found)


def test_windows_are_split_into_tokens_targets_and_starts() -> None:
    inputs = marked(windows())
    assert inputs.starts is not None
    assert torch.equal(inputs.tokens, windows()[:, :-1])
    assert torch.equal(inputs.targets, windows()[:, 1:])
    assert inputs.starts[0].tolist() == [0] * 13 + [13] + [14] * 16 + [30] * 10
    assert inputs.starts[1].tolist() == [0] * LENGTH
    assert WindowForm().split(windows()).keywords() == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_as_if_it_were_alone(family: str) -> None:
    model, inputs = model_of(family), marked(windows())
    logits = model(inputs.tokens, **inputs.keywords())
    # Products of other shapes add in another order, so the last bits differ.
    for lo, hi in zip(BORDERS, (*BORDERS[1:], LENGTH), strict=True):
        torch.testing.assert_close(logits[:1, lo:hi], model(inputs.tokens[:1, lo:hi]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1:], model(inputs.tokens[1:]), rtol=1e-4, atol=1e-5)
