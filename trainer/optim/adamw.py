"""AdamW with its full state from the start, and a gradient norm with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import unwrap
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import nn

from models.adapters import stored_name
from reprise.tensors import local_of, memory_holder, parameter_names, torch_dtype, with_memory
from trainer.config.dtype import Dtype
from trainer.config.optimizer import OptimizerSection
from trainer.optim import exact_sum
from trainer.optim.table import MOMENTS

# Squares are summed in float32 within a chunk and in float64 between chunks: as exact as float64, eight times faster.
_CHUNK = 1 << 16

_MOMENTS = ("exp_avg", "exp_avg_sq")
# How many bfloat16 moments are in float32 at once: fits a processor's cache; takes few launches on a device.
_ITEMS_CPU, _ITEMS_DEVICE = 1 << 17, 1 << 24


def stored_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's name on disk, in model order."""
    return {parameter: stored_name(name) for parameter, name in parameter_names(model).items()}


def build_adamw(
    model: nn.Module,
    section: OptimizerSection,
    no_decay: Collection[str],
    memory: Mapping[str, torch.Tensor] | None = None,
    *,
    without: Collection[str] = (),
    is_invariant: bool = False,
) -> torch.optim.AdamW:
    """Return a fused AdamW over the trainable parameters, with zero moments and step counts.

    With the state present from the start, the checkpoint layout depends on the model alone. The values equal torch's at
    the first step.

    Args:
        no_decay: Names of parameters without weight decay.
        memory: Zeros for the moments' local part, by `exp_avg.<name>` and `exp_avg_sq.<name>`. Moments without an entry
            get new memory.
        without: Names of parameters in another optimizer.
        is_invariant: See `build_optimizer`.
    """
    memory = memory or {}
    names = {p: name for p, name in stored_names(model).items() if p.requires_grad and name not in without}
    groups: dict[bool, list[tuple[str, nn.Parameter]]] = {}
    for parameter, name in names.items():
        groups.setdefault(name not in no_decay, []).append((name, parameter))
    groups = groups or {True: []}  # for a frozen stage: torch refuses an optimizer without groups
    kind = InvariantAdamW if is_invariant else EagerAdamW
    kind = kind if section.moments_dtype is Dtype.float32 else RoundingAdamW
    optimizer = kind(
        [
            {"params": members, "weight_decay": section.weight_decay if decays else 0.0}
            for decays, members in groups.items()
        ],
        lr=section.lr,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        fused=True,
    )
    dtype = moments_dtype(section)
    for parameter in names:
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=local_of(parameter).device)}
        for key in _MOMENTS:
            optimizer.state[parameter][key] = zeros_for(parameter, memory.get(f"{key}.{names[parameter]}"), dtype)
    return optimizer


class EagerOptimizer(torch.optim.Optimizer):
    """An optimizer outside compiled graphs.

    torch wraps its optimizers' methods for graphs, and the wrappers import torch._dynamo at their first call, which
    takes 0.8 s at a start. These are the unwrapped methods.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step between its hooks. Unlike torch's, it opens no range for a profiler at every call."""

        def step(self: EagerOptimizer) -> None:
            for hook in self._optimizer_step_pre_hooks.values():
                hook(self, (), {})
            func(self)
            for hook in self._optimizer_step_post_hooks.values():
                hook(self, (), {})

        return step


class EagerAdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's fused AdamW outside compiled graphs, on each rank's memory: DTensor's dispatcher takes longer."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters with a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                states = [self.state[parameter] for parameter in parameters]
                weights = list(map(memory_holder, parameters))
                gradients = [memory_holder(cast(torch.Tensor, parameter.grad)) for parameter in parameters]
                moments = ([memory_holder(state[key]) for state in states] for key in _MOMENTS)
                steps = [state["step"] for state in states]
                # By a tensor: torch would make one of a Python number for each step count.
                torch._foreach_add_(steps, torch.ones_like(steps[0]), alpha=1)
                self._update(group, weights, gradients, *moments, steps=steps)

    def _update(self, group: Mapping[str, Any], *columns: list[torch.Tensor], steps: list[torch.Tensor]) -> None:
        """Update tensors. The columns are weights, gradients, and each moment."""
        weights, gradients, exp_avgs, exp_avg_sqs = columns
        (beta1, beta2), numbers = group["betas"], {key: group[key] for key in ("lr", "weight_decay", "eps")}
        # torch's own step calls this kernel, after it has sorted the tensors by device and dtype.
        torch._fused_adamw_(
            weights, gradients, exp_avgs, exp_avg_sqs, [], steps,
            beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **numbers,
        )  # fmt: skip


class InvariantAdamW(EagerAdamW):
    """A fused AdamW whose step has the same bits for each element, however a tensor is sharded.

    On a CPU torch's fused kernel updates whole vectors, and a tensor's last elements individually with other roundings
    (ATen, `native/cpu/FusedAdamKernel.cpp`). Here the last elements are padded with zeros and updated as a vector too.
    """

    def _update(self, group: Mapping[str, Any], *columns: list[torch.Tensor], steps: list[torch.Tensor]) -> None:
        columns[1][:] = [gradient.contiguous() for gradient in columns[1]]
        cut = [number for number, weight in enumerate(columns[0]) if weight.numel() % _VECTOR]
        tails = [_Tails(column, cut) for column in columns] if cut else []
        self._update_vectors(group, *columns, steps=[*steps, *(steps[number] for number in cut)])
        for tail in tails:
            tail.write_back()

    def _update_vectors(
        self, group: Mapping[str, Any], *columns: list[torch.Tensor], steps: list[torch.Tensor]
    ) -> None:
        """Update tensors made up of whole vectors."""
        super()._update(group, *columns, steps=steps)


class RoundingAdamW(InvariantAdamW):
    """An `InvariantAdamW` with bfloat16 moments: updated in float32, chunk by chunk, and rounded to nearest even."""

    def _update_vectors(
        self, group: Mapping[str, Any], *columns: list[torch.Tensor], steps: list[torch.Tensor]
    ) -> None:
        items = _ITEMS_CPU if steps[0].device.type == "cpu" else _ITEMS_DEVICE
        rows = [
            (*parts, step)
            for *tensors, step in zip(*columns, steps, strict=True)
            for parts in zip(*(tensor.view(-1).split(items) for tensor in tensors), strict=True)
        ]
        ends = accumulate(row[0].numel() for row in rows)
        for _, members in groupby(zip(ends, rows, strict=True), lambda member: member[0] // items):
            weights, gradients, *moments, counts = map(list, zip(*(row for _, row in members), strict=True))
            exact = [[moment.float() for moment in column] for column in moments]
            super()._update_vectors(group, weights, gradients, *exact, steps=counts)
            for column, values in zip(moments, exact, strict=True):
                torch._foreach_copy_(column, values)


# float32 elements in the widest vector, and in the fused kernel's unit of work.
_VECTOR = 16


class _Tails:
    """The elements after the last whole vector of a column's cut tensors, each copied into a vector.

    The column gets the cut tensors' whole vectors in place of them, and these vectors at its end.

    Args:
        cut: The numbers of the tensors that do not end with a whole vector.
    """

    def __init__(self, column: list[torch.Tensor], cut: Sequence[int]) -> None:
        flats = [column[number].view(-1) for number in cut]
        self._originals = [flat[flat.numel() // _VECTOR * _VECTOR :] for flat in flats]
        vectors = flats[0].new_zeros(len(flats), _VECTOR).unbind()
        self._copies = [vector[: original.numel()] for vector, original in zip(vectors, self._originals, strict=True)]
        torch._foreach_copy_(self._copies, self._originals)
        for number, flat, original in zip(cut, flats, self._originals, strict=True):
            column[number] = flat[: flat.numel() - original.numel()]
        column += vectors

    def write_back(self) -> None:
        """Copy the elements back."""
        torch._foreach_copy_(self._originals, self._copies)


def moments_dtype(section: OptimizerSection) -> torch.dtype:
    """Return the moments' dtype in memory."""
    return torch_dtype(MOMENTS[section.moments_dtype])


def zeros_for(parameter: nn.Parameter, local: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros with a parameter's placements, in the given local memory or newly allocated."""
    like = parameter.detach()
    return torch.zeros_like(like, dtype=dtype) if local is None else with_memory(like, local)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the sum of squares over this rank's gradients, 0-d float64 on their device."""
    rows, remainders = list[torch.Tensor](), list[torch.Tensor]()
    for gradient in _gradients(parameters):
        end = gradient.numel() // _CHUNK * _CHUNK
        if not end:
            remainders.append(gradient)
            continue
        flat = gradient.reshape(-1)
        rows.append(torch.linalg.vector_norm(flat[:end].view(-1, _CHUNK), dim=1))
        if end < flat.numel():
            remainders.append(flat[end:])
    rows += [torch.stack(torch._foreach_norm(remainders))] if remainders else []
    norms = torch.cat(rows) if rows else torch.zeros(1)
    return norms.double().square().sum()


def gradient_squares(shares: Iterable[exact_sum.NormShare], device: torch.device) -> torch.Tensor:
    """Return the squared norm of each gradient row on this rank, float32 [rows], see `exact_sum.row_squares`.

    Ranks with the same rows divide them among themselves: the exact sum does not depend on how.
    """
    rows = exact_sum.row_squares(_tables(shares))
    return torch.cat(rows) if rows else torch.zeros(0, device=device)


def _tables(shares: Iterable[exact_sum.NormShare]) -> Iterator[torch.Tensor]:
    """Yield gradients as tables [rows, columns], virtual shards' parts separately."""
    for share in shares:
        if share.parameter.grad is None:
            continue
        gradient = local_of(share.parameter.grad)
        count = -(-gradient.shape[0] // share.count)
        gradient = gradient[share.index * count : (share.index + 1) * count]
        for part in gradient.chunk(share.shards, share.dimension) if share.dimension else [gradient]:
            if part.numel():
                yield part.reshape(part.shape[0], -1)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, clip_grad: float) -> None:
    """Scale gradients with the given norm down to at most `clip_grad`. 0 disables clipping."""
    if clip_grad > 0 and norm > clip_grad:
        gradients = _gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, torch.full((), clip_grad / norm, device=gradients[0].device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [local_of(gradient) for p in parameters if (gradient := p.grad) is not None]
    return [gradient for gradient in gradients if gradient.numel()]
