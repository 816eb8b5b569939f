"""An optimizer, or its state dict, by parameter name: its state, and its parameter groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.loading.reader import Checkpoint
from reprise.nested.modules import Receiver
from reprise.nested.stored_names import OPTIMIZER, Keys, pointer
from reprise.nested.typed_values import decode_number, encode_number, leaves, require_text_keys
from reprise.storage.json_file import Json
from reprise.tensors.live import canonical_name, parameter_names

# State with its parameter's shape, which reveals a wrong parameter order. Each optimizer in torch has one of these.
_SAME_SHAPE = ("exp_avg", "momentum_buffer", "square_avg", "sum")
_NOTHING = object()

State = MutableMapping[Any, Any]
# A value's keys in a tree, its container, its key there, and the parameter whose state it is.
Slot = tuple[Keys, State, str, nn.Parameter | None]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """An optimizer's parameter group: its parameters' names, and its hyperparameters as JSON.

    Args:
        names: The parameter names.
        numbers: The hyperparameters by key, without tensors.
        live: The group itself, in which a load replaces the hyperparameters.
        defaults: The keys in `numbers` whose values are the optimizer's defaults.
    """

    names: list[str]
    numbers: Json
    live: dict[str, Any]
    defaults: frozenset[str]

    def replace(self, numbers: Json) -> None:
        """Replace the hyperparameters, except tensors."""
        for key, value in numbers.items():
            if not isinstance(self.live.get(key), torch.Tensor):
                self.live[key] = decode_number(value)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """An optimizer, or its state dict, within a nested state dict.

    Args:
        keys: By parameter name, the parameter's key in `state`: a name, a number, or the parameter itself.
        slots: The places of the groups' tensors and of each value in the state.
        state: The parameters' state, to which a load adds missing state.
        parameters: By name, the parameters whose missing state a load creates.
        kind: The optimizer's class. Empty for a state dict.
    """

    keys: Mapping[str, Any]
    groups: list[ParameterGroup]
    slots: list[Slot]
    state: State
    parameters: Mapping[str, nn.Parameter]
    kind: str = ""

    @staticmethod
    def of(
        keys: Keys,
        names: Mapping[Any, str],
        groups: Sequence[dict[str, Any]],
        state: State,
        parameters: Mapping[nn.Parameter, str],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> OptimizerState:
        """Return the state for the optimizer under `keys`.

        Args:
            names: Parameter names, by whatever identifies the parameter in groups and state.
            optimizer: The optimizer itself, if there is one.

        Raises:
            CheckpointError: A group has an unstorable value, or a parameter with state is in no group or in two.
        """
        strays, places = [key for key in state if key not in names], [p for group in groups for p in group["params"]]
        if strays or len({names[p] for p in places}) < len(places):
            raise CheckpointError(
                "An optimizer has state of a parameter that is in no group, or a parameter that is in two",
                where=pointer(keys) or "the state dict",
                found=f"key {strays[0]!r:.80}" if strays else None,
                fix="Store the state under a parameter, or save it in `state`.",
            )
        parameter_groups, slots, defaults = [], list[Slot](), {} if optimizer is None else optimizer.defaults
        for number, group in enumerate(groups):
            inner = (*keys, "param_groups", str(number))
            require_text_keys(group, inner)
            tensors = [key for key, value in group.items() if isinstance(value, torch.Tensor)]
            slots += [((*inner, key), group, key, None) for key in tensors]
            numbers = {
                key: encode_number(value, (*inner, key))
                for key, value in group.items()
                if key not in ("params", "param_names", *tensors)
            }
            usual = frozenset(key for key in numbers if repr(group[key]) == repr(defaults.get(key, _NOTHING)))
            parameter_groups.append(ParameterGroup([names[p] for p in group["params"]], numbers, group, usual))
        by_name = {name: parameter for parameter, name in parameters.items()}
        for parameter, values in state.items():
            inner, owner = (*keys, "state", names[parameter]), by_name.get(names[parameter])
            require_text_keys(values, inner)
            slots += [((*inner, key), values, key, owner) for key in values]
        kind = "" if optimizer is None else type(optimizer).__name__
        by_parameter = {name: key for key, name in names.items()}
        return OptimizerState(by_parameter, parameter_groups, slots, state, by_name, kind)

    def vacancy(self, kind: str, name: str, key: str) -> Receiver | None:
        """Return the receiver of state that a load creates. None if a load does not create it.

        Args:
            kind: Its outermost key below the optimizer's keys: `"state"` or `"param_groups"`.
            name: The next key: a parameter name, or a group's number. A group's state is created for its first
                parameter.
            key: The innermost key.
        """
        owner = name if kind == "state" else ""
        groups = self.groups[int(name) :][:1] if kind == "param_groups" and name.isdecimal() else []
        for group in groups:
            owner = "" if key in group.live else next(iter(group.names), "")
        if owner not in self.parameters:
            return None

        def put(value: object) -> None:
            values = groups[0].live if groups else self.state.setdefault(self.keys[name], {})
            values[key] = value

        on_device = any(group.live.get("fused") or group.live.get("capturable") for group in self.groups)
        is_on_host = key == "step" and not on_device
        return Receiver(list, put, owner=torch.empty(0, device="cpu") if is_on_host else self.parameters[owner])


def of_optimizer(keys: Keys, modules: Mapping[Keys, nn.Module], optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state for a live optimizer.

    Args:
        modules: By keys, the modules with its parameters.

    Raises:
        CheckpointError: A parameter is outside the modules, or the optimizer has state beyond its groups and
            parameters; or see `OptimizerState.of`.
    """
    parameters = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        _refuse_extra_state(optimizer, parameters)
    names = _names_in(modules, parameters)
    foreign = sum(parameter not in names for parameter in parameters)
    if foreign:
        raise CheckpointError(
            "The optimizer holds parameters outside the model",
            where=None if keys == OPTIMIZER[:1] else pointer(keys),
            found=f"{foreign} of them",
            fix="Build the optimizer after the model is wrapped (fully_shard, parallelize_module, to), and pass the "
            "modules with all its parameters.",
        )
    return OptimizerState.of(keys, names, optimizer.param_groups, optimizer.state, names, optimizer)


def _names_in(modules: Mapping[Keys, nn.Module], parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the names for an optimizer's parameters: those in the first module with all of them.

    If no module has them all, each name starts with its module's keys.
    """
    names: dict[nn.Parameter, str] = {}
    for keys, module in modules.items():
        names_in_module = {
            parameter: name for parameter, name in parameter_names(module).items() if parameter in parameters
        }
        if len(names_in_module) == len(parameters):
            return names_in_module
        names = {parameter: ".".join((*keys, name)) for parameter, name in names_in_module.items()} | names
    return names


def _refuse_extra_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer whose own `state_dict()` has content beyond its groups and its parameters' state.

    Raises:
        CheckpointError: Names the first such content.
    """
    state = {number: optimizer.state.get(parameter) for number, parameter in enumerate(parameters)}
    content = {"state": state, "param_groups": [*optimizer.param_groups]}
    expected = {keys for keys, _ in leaves(content, OPTIMIZER[:1])}
    if extra := [keys for keys, _ in leaves(dict(optimizer.state_dict()), OPTIMIZER[:1]) if keys not in expected]:
        raise CheckpointError(
            "An optimizer's own state_dict() has content beyond its groups and its parameters' state",
            where=pointer(extra[0]),
            found=type(optimizer).__name__,
            fix="Save the additional content in `state`, or the whole dict with `save_state_dict`.",
        )


def of_state_dict(keys: Keys, state_dict: Mapping[Any, Any], model: nn.Module | None) -> OptimizerState | None:
    """Return the state in an optimizer's state dict. None for any other dict.

    Args:
        model: Names the parameters, which `optimizer.state_dict()` numbers.

    Raises:
        CheckpointError: A number does not clearly identify a parameter; or see `OptimizerState.of`.
    """
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return None
    if not isinstance(state, dict) or not all(isinstance(values, dict) for values in state.values()):
        return None
    numbers = [parameter for group in groups for parameter in group["params"]]
    is_named = all(isinstance(parameter, str) for parameter in numbers)
    parameters = {} if is_named or model is None else parameter_names(model)
    all_names = numbers if is_named else _names_of_numbers(keys, groups, numbers, parameters)
    names = dict(zip(numbers, all_names, strict=True))
    optimizer = OptimizerState.of(keys, names, groups, state, parameters)
    for place, values, key, owner in optimizer.slots:
        value = values[key]
        if owner is not None and key in _SAME_SHAPE and isinstance(value, torch.Tensor) and value.shape != owner.shape:
            raise CheckpointError(
                "An optimizer's parameter order differs from the model's",
                where=pointer(place),
                expected=f"the parameter's shape, {list(owner.shape)}",
                found=list(value.shape),
                fix="Pass get_optimizer_state_dict(model, optimizer).",
            )
    return optimizer


def _names_of_numbers(
    keys: Keys, groups: Sequence[Mapping[str, Any]], numbers: Sequence[object], parameters: Mapping[nn.Parameter, str]
) -> list[str]:
    """Return the names for numbered parameters, in group order."""
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        return [canonical_name(name) for group in groups for name in group.get("param_names") or ()]
    trained_names = [name for parameter, name in parameters.items() if parameter.requires_grad]
    for names in (list(parameters.values()), trained_names):
        if len(groups) == 1 and numbers == list(range(len(names))):
            return names
    raise CheckpointError(
        "The numbers in an optimizer's state dict do not identify its parameters",
        where=pointer(keys) or "the state dict",
        expected="parameter names, or model= and a single group with all its parameters in model order",
        found=f"{count_of(len(groups), 'group')} of {count_of(len(numbers), 'parameter')}",
        fix="Create the optimizer from model.named_parameters(), which puts names in its state dict, or pass "
        "get_optimizer_state_dict(model, optimizer) from torch.distributed.checkpoint.state_dict.",
    )


def check_optimizer(checkpoint: Checkpoint, optimizer: OptimizerState | None) -> None:
    """Refuse state from another optimizer class, with which the next step would fail or be wrong.

    Raises:
        MismatchError: The checkpoint was saved with another optimizer class.
    """
    record = checkpoint.state.get("optimizer", {})
    saved = record.get("name") if isinstance(record, dict) else record
    if optimizer is not None and optimizer.kind and saved not in (None, optimizer.kind):
        raise MismatchError(
            "The checkpoint was saved with another optimizer class",
            where=checkpoint.path,
            expected=optimizer.kind,
            found=saved,
            fix=f"Pass an optimizer of class {saved}, or load the model alone.",
        )
