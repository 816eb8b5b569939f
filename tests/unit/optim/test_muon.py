"""Muon's step has the bits of torch's where torch has one, and of one matrix where a weight is fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.build import build_model
from models.families import block_matrices
from tests.unit.model_samples import GPT2, QWEN3, backward, fill, random_values, samples
from trainer.config.dtype import Dtype
from trainer.config.optimizer import OptimizerName, OptimizerSection
from trainer.optim.build import build_optimizer
from trainer.optim.muon import orthogonalized
from trainer.optim.table import state_tensors

SECTION = OptimizerSection(name=OptimizerName.muon, lr=0.02, weight_decay=0.3)


@pytest.mark.parametrize("matches", [True, False])
def test_a_step_has_the_bits_of_torchs_muon_and_adamw(matches: bool) -> None:
    torch.manual_seed(1)
    values, batch = random_values(QWEN3), samples(QWEN3)
    ours, theirs = (fill(build_model(QWEN3), values) for _ in range(2))
    optimizer = build_optimizer(QWEN3, ours, replace(SECTION, muon_match_rms_adamw=matches))
    matrices = block_matrices(QWEN3)
    named = dict(theirs.named_parameters())
    adjust = "match_rms_adamw" if matches else "original"
    muon = torch.optim.Muon(
        [p for n, p in named.items() if n in matrices], lr=0.02, weight_decay=0.3, momentum=0.95, adjust_lr_fn=adjust
    )
    rest = {n: p for n, p in named.items() if n not in matrices}
    groups = [
        {"params": [p for p in rest.values() if (p.ndim > 1) == d], "weight_decay": 0.3 * d} for d in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(3):
        backward(ours, batch)
        backward(theirs, batch)
        for stepper in (optimizer, muon, adamw):
            stepper.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
        assert (name in matrices) == (optimizer.state[mine].keys() == {"momentum_buffer"})


def test_momentum_in_bfloat16_is_rounded_after_a_step() -> None:
    torch.manual_seed(1)
    values, matrices = random_values(QWEN3), block_matrices(QWEN3)
    ours, theirs = (fill(build_model(QWEN3), values) for _ in range(2))
    section = replace(SECTION, muon_match_rms_adamw=False, moments_dtype=Dtype.bfloat16)
    optimizer = build_optimizer(QWEN3, ours, section)
    pairs = [(p, q) for (n, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True) if n in matrices]
    muon = torch.optim.Muon([q for _, q in pairs], lr=0.02, weight_decay=0.3)
    for _ in range(3):
        for mine, other in pairs:
            mine.grad = other.grad = torch.randn(mine.shape)
        optimizer.step()
        muon.step()
        for mine, other in pairs:
            kept, momentum = (stepper.state[p]["momentum_buffer"] for stepper, p in ((optimizer, mine), (muon, other)))
            torch.testing.assert_close(kept, momentum.bfloat16(), rtol=0, atol=0)
            momentum.copy_(kept)
            assert torch.equal(mine, other)


def test_what_it_keeps_is_what_the_table_says() -> None:
    model = build_model(GPT2)
    optimizer = build_optimizer(GPT2, model, SECTION)
    kept = {f"{k}.{n}": tuple(t.shape) for n, p in model.named_parameters() for k, t in optimizer.state[p].items()}
    assert kept == {tensor.name: tensor.stored.view for tensor in state_tensors(SECTION, GPT2)}
    keys = [tensor.key for tensor in state_tensors(SECTION, GPT2)]
    assert list(dict.fromkeys(keys)) == ["exp_avg", "exp_avg_sq", "momentum_buffer", "step"]
    assert keys.count("momentum_buffer") == 4 * GPT2.n_layer


def test_a_fused_weight_is_one_matrix() -> None:
    model = fill(build_model(GPT2), random_values(GPT2))
    optimizer = build_optimizer(GPT2, model, replace(SECTION, weight_decay=0.0))
    fused = next(p for n, p in model.named_parameters() if n.endswith("c_attn.weight"))
    before = fused.detach().clone()
    backward(model, samples(GPT2))
    assert fused.grad is not None
    momentum = torch.zeros_like(fused.grad).lerp(fused.grad, 1 - 0.95)
    update = orthogonalized(fused.grad.lerp(momentum, 0.95).flatten(1), 5)
    optimizer.step()
    expected = before.flatten(1) - 0.02 * 0.2 * 90**0.5 * update.float()
    torch.testing.assert_close(fused.detach().flatten(1), expected, rtol=0, atol=1e-6)


def test_a_step_calls_its_hooks_once() -> None:
    model = fill(build_model(GPT2), random_values(GPT2))
    optimizer = build_optimizer(GPT2, model, SECTION)
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(None))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, samples(GPT2))
    optimizer.step()
    assert called == [None]
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
