"""AdamW with its state there from the start, and the gradient norm with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.checkpoint.tensors.live import is_dtensor, local_of, parameter_names, with_memory

# Squares are summed in float32 within a chunk and in float64 between chunks: as exact as float64, eight times faster.
_CHUNK = 1 << 16

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The numbers of AdamW; `no_decay` names the parameters without weight decay."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    no_decay: frozenset[str]


def build_adamw(
    model: nn.Module, settings: AdamSettings, memory: Mapping[str, torch.Tensor] | None = None
) -> torch.optim.AdamW:
    """Return a fused AdamW over the trainable parameters, with zero moments and steps for every one of them.

    Having the state from the start makes the layout of a checkpoint a function of the model alone; the values are
    those that torch would make at the first step.

    Args:
        memory: zeros for the local part of moments, by `exp_avg.<name>` and `exp_avg_sq.<name>`, where they are to lie
            in memory that was chosen for them.
    """
    memory = memory or {}
    names = {p: name for p, name in parameter_names(model).items() if p.requires_grad}
    groups: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for parameter, name in names.items():
        # A fused step takes either plain tensors or DTensors.
        groups.setdefault((name not in settings.no_decay, is_dtensor(parameter)), []).append((name, parameter))
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": settings.weight_decay if decays else 0.0}
            for (decays, _), members in groups.items()
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in names:
        moment = parameter.detach()
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=local_of(parameter).device)}
        for key in MOMENTS:
            local = memory.get(f"{key}.{names[parameter]}")
            optimizer.state[parameter][key] = torch.zeros_like(moment) if local is None else with_memory(moment, local)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the sum of squares of this rank's gradients, 0-d float64 on their device."""
    rows, rest = list[torch.Tensor](), list[torch.Tensor]()
    for gradient in _gradients(parameters):
        whole = gradient.numel() // _CHUNK * _CHUNK
        flat = gradient.reshape(-1) if whole else gradient
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1))
        if whole < gradient.numel():
            rest.append(flat[whole:])
    norms = [*rows, torch.stack(torch._foreach_norm(rest))] if rest else rows
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, clip_grad: float) -> None:
    """Scale gradients so that their norm, given as it is, is at most `clip_grad`; 0 leaves them."""
    if clip_grad > 0 and norm > clip_grad:
        gradients = _gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, torch.tensor(clip_grad / norm, device=gradients[0].device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [gradient for gradient in gradients if gradient.numel()]
