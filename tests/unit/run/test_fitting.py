"""Stored weights fill tensors of another dtype or size, the same bits however these are cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from reprise.errors import MismatchError
from reprise.format import Box, Place, StoredDtype, TensorKind, TensorSpec
from reprise.tensors import LiveTensor
from tests.harness import compose
from trainer.config.checkpoint import CheckpointSection
from trainer.run.fitting import Fit, Fitting, fill_unstored

MODEL = compose(["model=gpt2_tiny"]).model
TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
PLACES = {"t": Place(TensorSpec(TensorKind.MODEL, "t", (10, 4), StoredDtype.BF16, (10, 4)), "model.safetensors", 4096)}


def live(lo: int, hi: int, rows: int) -> LiveTensor:
    spec = TensorSpec(TensorKind.MODEL, "t", (rows, 4), StoredDtype.F32, (rows, 4))
    return LiveTensor(spec, Box((lo, 0), (hi - lo, 4)), torch.full((hi - lo, 4), 7.0), (0,))


def read(tensor: LiveTensor) -> None:
    assert tensor.spec.shape == (10, 4)
    tensor.local.copy_(TABLE[tensor.box.slices])


def fitted(tensor: LiveTensor) -> torch.Tensor:
    fit = Fit(casts=True, rows={"t": 10})
    fitting = Fitting(fit, [tensor], fit.stored([tensor.spec], PLACES))
    for request in fitting.requests:
        read(request)
    fitting.finish()
    return tensor.local


@pytest.mark.parametrize(("rows", "cuts"), [(16, (0, 16)), (16, (0, 5, 16)), (16, (0, 12, 16)), (7, (0, 3, 7))])
def test_old_rows_are_kept_by_number_at_any_cut(rows: int, cuts: tuple[int, ...]) -> None:
    found = torch.cat([fitted(live(lo, hi, rows)) for lo, hi in pairwise(cuts)])
    old = min(rows, 10)
    assert torch.equal(found[:old], TABLE[:old].float())
    assert all(torch.equal(row, torch.full((4,), 7.0)) for row in found[old:])


def test_only_a_run_from_weights_alone_fits_anything() -> None:
    larger = replace(MODEL, vocab_size=300, max_position_embeddings=512)
    every = CheckpointSection(finetune=True, resize=True, partial=["*wte*"])
    fit = Fit.of(every, MODEL, larger)
    assert fit.rows == {"transformer.wte.weight": 257, "transformer.wpe.weight": 256}
    assert fit.casts
    assert fit.patterns == ("*wte*",)
    assert Fit.of(replace(every, finetune=False), MODEL, larger) == Fit()


def test_what_is_left_is_named_and_a_pattern_must_fit() -> None:
    names = ["a.weight", "a.bias", "b.weight"]
    assert Fit(patterns=("a.*",)).unselected(names) == ["b.weight"]
    assert Fit().unselected(names) == []
    with pytest.raises(MismatchError, match=r"checkpoint\.partial.*found c\.\*"):
        Fit(patterns=("a.*", "c.*")).unselected(names)


def test_what_is_not_loaded_begins_as_in_a_fresh_run() -> None:
    spec = TensorSpec(TensorKind.MODEL, "transformer.wpe.weight", (256, 128), StoredDtype.F32, (256, 128))
    one, other = (LiveTensor(spec, Box((0, 0), (256, 128)), torch.zeros(256, 128), (0,)) for _ in range(2))
    fill_unstored(Fit(patterns=("*wte*",)), [one], MODEL, 5)
    assert one.local.std() > 0.01
    fill_unstored(Fit(patterns=("*wpe*",)), [other], MODEL, 5)
    assert not other.local.any()
