"""A checkpoint as nanoGPT writes it begins a run, by the program that the document shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from models.build import build_model
from models.config import Activation
from tests.harness import TINY, compose, run_ok
from tests.unit.model_samples import fill

ROOT = Path(__file__).parents[2]
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 20, "block_size": 32, "vocab_size": 260}


class _Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = _Norm(width, bias), _Attention(width, heads, bias)
        self.ln_2, self.mlp = _Norm(width, bias), _MLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """The model of nanoGPT's `model.py`, under its names: exact GELU, `nn.Linear`, optional biases, a tied output."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        width, heads = SIZES["n_embd"], SIZES["n_head"]
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(SIZES["vocab_size"], width),
            "wpe": nn.Embedding(SIZES["block_size"], width),
            "h": nn.ModuleList(_Block(width, heads, bias) for _ in range(SIZES["n_layer"])),
            "ln_f": _Norm(width, bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, SIZES["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


def write_checkpoint(path: Path, *, bias: bool, prefix: str) -> NanoGPT:
    """Write a random model as nanoGPT does after some iterations, with the prefix that compilation leaves."""
    torch.manual_seed(5)
    model = NanoGPT(bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    path.parent.mkdir()
    saved = {
        "model": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {**SIZES, "bias": bias, "dropout": 0.0},
        "iter_num": 1,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3},
    }
    torch.save(saved, path)
    return model


@pytest.mark.parametrize(("bias", "prefix"), [(True, ""), (False, "_orig_mod.")])
def test_a_nanogpt_checkpoint_begins_a_run_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool, prefix: str
) -> None:
    theirs = write_checkpoint(tmp_path / "out/ckpt.pt", bias=bias, prefix=prefix)
    section = (ROOT / "docs/interop.md").read_text().split("\n## nanoGPT\n")[1]
    block = re.search(r"^```python\n(.*?)^```", section, flags=re.M | re.S)[1]  # type: ignore[index]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "interop.md", "exec"), {})  # noqa: S102 - our own document
    command = ["model=gpt2_tiny", *TINY, "model.intermediate_size=80", "model.vocab_size=260", "model.activation=gelu"]
    still = ["train.train_iters=1", "schedule.lr_warmup_iters=0", "schedule.min_lr=0.0", "optimizer.lr=0.0"]
    run = tmp_path / "run"
    run_ok(run, [*command, *still, f"checkpoint.load={tmp_path}/nanogpt-hf", "checkpoint.finetune=true"])
    iteration = run / "checkpoints/iter_0000001"
    assert json.loads((iteration / "config.json").read_text())["activation_function"] == "gelu"
    config, weights = compose(command).model, load_file(iteration / "model.safetensors")
    ours, tanh = (fill(build_model(replace(config, activation=form)), weights) for form in reversed(Activation))
    tokens = torch.randint(0, 260, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected, other = ours(tokens), theirs(tokens), tanh(tokens)
    # float32 sums in another order.
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() <= 2e-5
    assert (other - expected).abs().max() > 1e-4
