"""Moments lie in memory as they will lie in their file."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.build import build_model
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import PAGE_BYTES, TensorKind, TensorSpec, build_layout
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Grid, LiveTensor
from tests.harness import compose
from tests.unit.model_samples import GPT2, fill, random_values
from trainer.config.dtype import Dtype
from trainer.config.optimizer import OptimizerSection
from trainer.run.state import TrainerState, build_part, checkpoint_specs

FILE_BYTES = 30_000


@pytest.mark.parametrize(("pad_vocab_multiple", "dtype"), [(1, "bfloat16"), (1, "float32"), (64, "float32")])
def test_a_file_aligned_state_is_congruent_and_keeps_its_values(pad_vocab_multiple: int, dtype: str) -> None:
    settings = OptimizerSection(moments_dtype=Dtype(dtype))
    config = dataclasses.replace(GPT2, pad_vocab_multiple=pad_vocab_multiple)
    model = fill(build_model(config), random_values(config))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole = compose([f"checkpoint.file_bytes={FILE_BYTES}"])
    whole.model, whole.optimizer = config, settings
    specs = tuple(checkpoint_specs(config, settings))
    part = build_part(whole, model, Grid.flat(1), specs)
    state = TrainerState(config, [part], Grid.flat(1), specs)
    layout = build_layout(specs, file_bytes=FILE_BYTES)
    live = [tensor for tensor in state.shards() if tensor.local.ndim > 0]
    assert len(live) == 3 * len(list(model.parameters()))
    copied = [tensor.spec for tensor in live if layout.places[tensor.spec.name].offset % 64]
    copied = [spec for spec in copied if spec.kind is TensorKind.MODEL]  # memory that products read is aligned instead
    assert 0 < len(copied) < len(before)
    for tensor in live:
        place = 0 if tensor.spec in copied else layout.places[tensor.spec.name].offset
        assert (tensor.local.data_ptr() - place) % (64 if tensor.spec in copied else PAGE_BYTES) == 0
        assert tensor.spec == layout.places[tensor.spec.name].spec
        assert not (tensor.spec.name.startswith("exp_avg") and tensor.local.any())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, values in part.optimizer.state.items():
        assert {key: value.shape for key, value in values.items()} == {
            "step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape
        }  # fmt: skip


def test_a_shard_of_another_dtype_is_congruent_to_its_place() -> None:
    spec = TensorSpec(TensorKind.MODEL, "w", (4000,), StoredDtype.F32, (4000,))
    moment = dataclasses.replace(spec, kind=TensorKind.OPTIMIZER, name="exp_avg.w", dtype=StoredDtype.BF16)
    layout = build_layout((spec, moment))
    live = LiveTensor(spec, Box((1000,), (999,)), torch.empty(999), (0,))
    (memory,) = zeros_like_files([(live, live.local)], ("exp_avg.",), layout).values()
    assert (memory.data_ptr() - layout.places["exp_avg.w"].offset - 2000) % PAGE_BYTES == 0
