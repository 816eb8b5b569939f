"""The names of the parameters in an optimizer's state dict, which `optimizer.state_dict()` gives as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError, count_of
from reprise.tensors.live import canonical_name, parameter_names

# State of a parameter's own shape, by which a wrong order of parameters is noticed.
_SAME_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")

Names = dict[str | int, str]


def is_optimizer_state(state_dict: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state dict of an optimizer."""
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    is_list = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    return is_list and isinstance(state, dict) and all(isinstance(values, dict) for values in state.values())


def names_of(state_dict: Mapping[str, Any], model: nn.Module | None, *, where: str) -> Names:
    """Return the name of each parameter in an optimizer's state dict, by its name or number there.

    Args:
        model: the model whose parameters, in their order, the optimizer was made of.

    Raises:
        CheckpointError: if the parameter of a number is uncertain.
    """
    groups = state_dict["param_groups"]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(isinstance(parameter, str) for parameter in parameters):
        names: Names = {name: name for name in parameters}
    else:
        names = dict(zip(parameters, _numbered(groups, parameters, model, where), strict=True))
        _check_shapes(state_dict["state"], names, model, where)
    strangers = [parameter for parameter in state_dict["state"] if parameter not in names]
    if strangers or len(set(names.values())) != len(parameters):
        raise CheckpointError(
            "An optimizer's state dict names a parameter that is in no group, or one twice",
            where=where,
            found=strangers[:1] or None,
        )
    return names


def _numbered(
    groups: Sequence[Mapping[str, Any]], parameters_of_groups: Sequence[object], model: nn.Module | None, where: str
) -> list[str]:
    """Return the names of numbered parameters, in the order of the groups."""
    names_of_groups = [group.get("param_names") or () for group in groups]
    if all(len(names) == len(group["params"]) for names, group in zip(names_of_groups, groups, strict=True)):
        return [canonical_name(name) for names in names_of_groups for name in names]
    if model is None:
        raise CheckpointError(
            "An optimizer's state dict has numbers for the names of parameters",
            where=where,
            expected="names: a number depends on the order of the parameters, and every stage of a pipeline has a 0",
            fix="Give get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict, or name "
            "the model with model=.",
        )
    parameters = parameter_names(model)
    for names in (list(parameters.values()), [name for p, name in parameters.items() if p.requires_grad]):
        if len(groups) == 1 and list(parameters_of_groups) == list(range(len(names))):
            return names
    raise CheckpointError(
        "The parameters of an optimizer cannot be told by their numbers",
        where=where,
        expected=f"one parameter group of all {len(parameters)} parameters of the model, in its order",
        found=f"{count_of(len(groups), 'group')} of {count_of(len(parameters_of_groups), 'parameter')}",
        fix="Make the optimizer of model.named_parameters(), so that its state dict has their names, or give "
        "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict.",
    )


def _check_shapes(state: Mapping[Any, Any], names: Names, model: nn.Module | None, where: str) -> None:
    """Refuse state of another shape than its parameter: the optimizer has them in another order than the model."""
    if model is None:
        return
    shapes = {name: parameter.shape for parameter, name in parameter_names(model).items()}
    for number, values in state.items():
        for key in _SAME_SHAPE:
            value, name = values.get(key), names.get(number, "")
            if isinstance(value, torch.Tensor) and name in shapes and value.shape != shapes[name]:
                raise CheckpointError(
                    "An optimizer has its parameters in another order than the model",
                    where=f"{where}, {key} of parameter {number}",
                    expected=f"the shape of {name}, {list(shapes[name])}",
                    found=list(value.shape),
                    fix="Give get_optimizer_state_dict(model, optimizer).",
                )
