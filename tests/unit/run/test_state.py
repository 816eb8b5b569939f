"""The memory of the parameters has one alignment, on which sums in products depend, at any size of the files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.build import build_model
from models.config import LoraConfig, ModelConfig
from models.layers import token_loss
from models.network import Model
from reprise.tensors import Grid
from tests.harness import compose
from tests.unit.model_samples import FAMILIES, fill, random_values
from trainer.parallel.adapters import add_adapters
from trainer.run.state import build_part, checkpoint_specs

# Sizes that no vector divides: files of them have tensors at every offset.
_SIZES = {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "intermediate_size": 7, "vocab_size": 261, "rope_scaling": None}
_EVERY = {name: replace(config, **_SIZES) for name, config in FAMILIES.items()}  # type: ignore[arg-type]
ODD = {
    "gpt2": replace(_EVERY["gpt2"], n_embd=6),
    "llama3": replace(_EVERY["llama3"], n_embd=10),
    "qwen3": replace(_EVERY["qwen3"], n_embd=9, head_dim=6),
}
# Each family with and without adapters, in one dtype each; the others are slow.
CASES = [
    pytest.param(name, rank, dtype, marks=() if (dtype is torch.bfloat16) == bool(rank) else pytest.mark.slow)
    for name in ODD
    for rank in (0, 1)
    for dtype in (torch.float32, torch.bfloat16)
]
LAYOUTS = (1 << 30, 3_000, 700)


def model_of(config: ModelConfig, dtype: torch.dtype) -> Model:
    """Return a model in memory of torch's allocator, as where its parameters are gathered."""
    torch.manual_seed(0)
    model = fill(build_model(replace(config, lora=LoraConfig()), compute_dtype=dtype), random_values(config))
    if config.lora.rank:
        model.config = config
        add_adapters(model, None)
        generator = torch.Generator().manual_seed(1)
        for module in model.modules():
            for name in ("lora_A", "lora_B"):
                factor = getattr(module, name, None)
                if factor is not None:
                    factor.weight = nn.Parameter(torch.randn(factor.weight.shape, generator=generator))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return model


def laid_out(config: ModelConfig, dtype: torch.dtype, *, file_bytes: int) -> Model:
    """Return the same model in the memory of a rank that holds it whole."""
    model = model_of(config, dtype)
    whole = compose([f"checkpoint.file_bytes={file_bytes}"])
    whole.model = config
    build_part(whole, model, Grid.flat(1), tuple(checkpoint_specs(config, whole.optimizer)))
    return model


def bits(model: Model, *, rows: int, length: int) -> list[bytes]:
    """Return the bits of the loss and of every gradient of one forward and backward pass."""
    windows = torch.randint(0, 261, (rows, length + 1), generator=torch.Generator().manual_seed(2))
    loss = token_loss(model(windows[:, :-1]), windows[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return [part.detach().float().numpy().tobytes() for part in (loss, *gradients)]


def alignments(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {parameter.data_ptr() % 64 for parameter in parameters}


@pytest.mark.parametrize(("family", "rank", "dtype"), CASES)
def test_bits_depend_on_no_place_in_a_file(family: str, rank: int, dtype: torch.dtype) -> None:
    config = replace(ODD[family], lora=LoraConfig(rank=rank, alpha=2.0))
    for rows, length in ((1, 1), (1, 3), (2, 3), (3, 1)):
        expected = bits(model_of(config, dtype), rows=rows, length=length)
        for file_bytes in LAYOUTS:
            model = laid_out(config, dtype, file_bytes=file_bytes)
            assert bits(model, rows=rows, length=length) == expected
            assert alignments(model.parameters()) == {0}
