"""AdamW with its state from the start, and the gradient norm."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.config.dtype import Dtype
from trainer.config.optimizer import OptimizerSection
from trainer.optim import adamw, exact_sum
from trainer.optim.adamw import build_adamw, clip_gradients, gradient_squares, squared_norm
from trainer.optim.exact_sum import NormShare

SECTION = OptimizerSection(lr=0.1, weight_decay=0.3)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1234)
    return nn.Linear(300, 400)


def backward(model: nn.Module) -> list[nn.Parameter]:
    model(torch.randn(5, 300, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    return list(model.parameters())


def test_state_exists_before_the_first_step_and_changes_nothing(model: nn.Module) -> None:
    lazy_model = copy.deepcopy(model)
    optimizer = build_adamw(model, SECTION, {"bias"})
    assert [set(state) for state in optimizer.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    lazy = torch.optim.AdamW(
        [
            {"params": [lazy_model.weight], "weight_decay": 0.3},
            {"params": [lazy_model.bias], "weight_decay": 0.0},
        ],
        lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for _ in range(3):
        for network, stepper in ((model, optimizer), (lazy_model, lazy)):
            stepper.zero_grad()
            backward(network)
            stepper.step()
    for ours, theirs in zip(model.parameters(), lazy_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[ours][key], lazy.state[theirs][key])


def test_named_parameters_skip_the_decay_and_frozen_are_left_out(model: nn.Module) -> None:
    groups = build_adamw(model, SECTION, {"bias"}).param_groups
    assert [(g["weight_decay"], [tuple(p.shape) for p in g["params"]]) for g in groups] == [
        (0.3, [(400, 300)]),
        (0.0, [(400,)]),
    ]
    next(model.parameters()).requires_grad_(False)
    optimizer = build_adamw(model, SECTION, {"bias"})
    assert [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]] == [(400,)]
    assert len(optimizer.state) == 1


def test_the_norm_is_the_exact_one(model: nn.Module) -> None:
    parameters = backward(model)
    exact = sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None)
    # Squares are summed in float32 within chunks of 65536.
    assert float(squared_norm(parameters)) == pytest.approx(exact, rel=1e-6)
    torchs = nn.utils.clip_grad_norm_(parameters, float("inf"))
    assert float(squared_norm(parameters)) ** 0.5 == pytest.approx(float(torchs), rel=1e-6)
    assert squared_norm(parameters).dtype == torch.float64


def test_parameters_without_a_gradient_have_norm_zero() -> None:
    assert float(squared_norm([nn.Parameter(torch.ones(3))])) == 0.0
    empty = nn.Parameter(torch.ones(0, 3))
    empty.grad = torch.ones(0, 3)
    assert float(squared_norm([empty])) == 0.0
    clip_gradients([empty], 5.0, 1.0)


def test_rows_of_small_gradients_are_squared_as_each_alone() -> None:
    shapes = [(3, 5), (4,), (2, 5), (7,), (1, 1), (200, 99), (2, 3, 5)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    shares = [NormShare(parameter, index=0, count=1) for parameter in parameters]
    tables = [torch.as_tensor(parameter.grad).flatten(1) for parameter in parameters if parameter.ndim > 1]
    tables += [torch.as_tensor(parameter.grad).unsqueeze(1) for parameter in parameters if parameter.ndim == 1]
    alone = torch.cat([torch.cat(exact_sum.row_squares([table])) for table in tables])
    assert gradient_squares(shares, torch.device("cpu")).sort().values.tolist() == alone.sort().values.tolist()


@pytest.mark.parametrize(("clip_grad", "expected"), [(0.0, 5.0), (10.0, 5.0), (5.0, 5.0), (2.0, 2.0)])
def test_clipping_bounds_the_norm_and_zero_does_not_clip(clip_grad: float, expected: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_gradients([parameter], 5.0, clip_grad)
    assert float(parameter.grad.norm()) == pytest.approx(expected, rel=1e-6)
    if expected == 5.0:
        assert parameter.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("cut", [0, 1, 5, 16, 129, 500, 1003])
def test_an_invariant_step_ignores_where_a_shard_ends(cut: int, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_ITEMS_CPU", 64)
    section = replace(SECTION, moments_dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    values, gradients = torch.randn(1003, generator=generator), torch.randn(4, 1003, generator=generator)
    whole = stepped([values], [[gradient] for gradient in gradients], section)
    pieces = [values[:cut], values[cut:]], [[gradient[:cut], gradient[cut:]] for gradient in gradients]
    assert torch.equal(whole, stepped(*pieces, section))
    vectors = [values[:992]], [[gradient[:992]] for gradient in gradients]  # which torch's own steps divide evenly
    assert torch.equal(stepped(*vectors, section), torchs(*vectors, dtype))


def torchs(values: list[torch.Tensor], steps: list[list[torch.Tensor]], dtype: Dtype) -> torch.Tensor:
    """Return what steps of torch's AdamW leave, if the bits of moments are rounded to nearest even after each."""
    (parameter,) = parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for (parameter.grad,) in steps:
        optimizer.step()
        moments = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
        for bits in (moment.view(torch.int32) for moment in moments if dtype is Dtype.bfloat16):
            bits += 0x7FFF + (bits >> 16 & 1)
            bits &= -0x10000
    return torch.cat([parameter.detach(), *moments])


def stepped(values: list[torch.Tensor], steps: list[list[torch.Tensor]], section: OptimizerSection) -> torch.Tensor:
    """Return parameters, moments and steps after steps with the gradients given, end to end."""
    model = nn.ParameterList([nn.Parameter(value.clone()) for value in values])
    optimizer = build_adamw(model, section, {"bias"}, is_invariant=True)
    for gradients in steps:
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    kept = [[optimizer.state[parameter][key] for parameter in model] for key in ("exp_avg", "exp_avg_sq")]
    assert all(float(optimizer.state[parameter]["step"]) == len(steps) for parameter in model)
    assert {moment.dtype for column in kept for moment in column} == {getattr(torch, section.moments_dtype.value)}
    return torch.cat([tensor.detach() for column in ([*model], *kept) for tensor in column])
