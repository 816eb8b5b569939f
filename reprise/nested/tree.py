"""A nested state dict split into leaves: tensors, JSON values, objects and parameter groups."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from reprise.errors import CheckpointError
from reprise.nested.documents import Section
from reprise.nested.folder_files import folder_files
from reprise.nested.modules import Receiver, extra_states, refuse_flat_shards, refuse_own_entries
from reprise.nested.optimizers import OptimizerState, of_optimizer, of_state_dict
from reprise.nested.pretrained import PretrainedForm, form_of
from reprise.nested.random_state import RandomState
from reprise.nested.save_arguments import require
from reprise.nested.stored_names import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    RNG,
    Keys,
    pointer,
    stored_name,
)
from reprise.nested.typed_values import DICTS, encode, has_text_keys, leaves, require_text_keys
from reprise.storage.json_file import Json
from reprise.tensors.file_form import StorableTensor, resolve
from reprise.tensors.live import free_gathered_parameters, is_sharded, named_tensors, order_in_memory

IF_SAME_RANKS = "if_same_ranks"
LoadedRandomState = bool | Literal["if_same_ranks"] | None

_Container = dict[str, Any] | list[Any] | tuple[Any, ...]
Place = tuple[_Container, str | int]


def is_stateful(value: object) -> bool:
    """Return whether a value is an object with `state_dict()` and `load_state_dict()`, such as a scheduler."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


@dataclass(slots=True)
class Tree:
    """A nested state dict split into leaves.

    Args:
        is_load: Whether the tree is for a load. Objects, and values with tensors, then receive their state at the end.
        returns: Whether a load returns the `state` values under outermost keys missing from the call. The values of a
            save then refer to their tensors.
        model: Names the parameters in `optimizer.state_dict()`, which numbers them.
        given: The `state` values in the call, which a load returns too.
        tensors: By keys, the tensors in storable form, in dict order.
        values: In a save, all other content as JSON by JSON Pointer. A list without tensors is a single value. So is a
            dict without tensors if it is a subclass instance or has non-string keys.
        optimizers: The optimizers by their keys.
        objects: By keys, the objects with their own state.
        receivers: By keys, the receivers of a new value or state at the end of a load.
        files: Files for other programs, by name.
        form: The model in another library's form. The names of renamed tensors become aliases.
        declined: The `load` arguments explicitly passed as False or empty. A load leaves declined random state alone.
        may_drop_random_state: Whether a load skips random state saved by a different rank count.
    """

    is_load: bool
    returns: bool = False
    model: nn.Module | None = None
    given: Mapping[str, object] = field(default_factory=dict)
    tensors: dict[Keys, StorableTensor] = field(default_factory=dict)
    values: Json = field(default_factory=dict)
    optimizers: dict[Keys, OptimizerState] = field(default_factory=dict)
    objects: dict[Keys, Any] = field(default_factory=dict)
    receivers: dict[Keys, Receiver] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    form: PretrainedForm = field(default_factory=PretrainedForm)
    declined: Collection[str] = ()
    may_drop_random_state: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether every rank saves all of the model, and values refer to their tensors."""
        return self.returns and not self.is_load

    def add_dict(self, keys: Keys, members: dict[Any, Any]) -> None:
        """Add a dict by leaf, and an optimizer's state dict by parameter. Copies nothing.

        Raises:
            CheckpointError: A leaf cannot be stored, a key above a tensor is not a string, or an optimizer's parameters
                have numbers and no names.
        """
        require_text_keys(members, keys)
        optimizer = of_state_dict(keys, members, self.model)
        if optimizer is not None:
            self._add_optimizer(keys, optimizer)
        for key, value in members.items():
            if optimizer is None or key not in ("state", "param_groups"):
                self.add((*keys, key), value, (members, key))

    def add(self, keys: Keys, value: object, place: Place) -> None:
        """Add a state dict member by leaf, or as a single value.

        Args:
            place: The member's container and its key there, for a load.

        Raises:
            CheckpointError: See `add_dict`.
        """
        may_have_tensors = self.is_whole and not isinstance(value, dict)
        is_single = {_is_value(leaf, may_have_tensors) for _, leaf in leaves(value, keys)} <= {True}  # visits all
        is_by_leaf = isinstance(value, dict) and has_text_keys(value)
        is_by_leaf = is_by_leaf and (self.is_load or type(value) not in (OrderedDict, Counter))
        if is_single and not (is_by_leaf and value):
            current, where = {} if is_by_leaf else value, pointer(keys)  # an empty dict of any class is a plain one
            if not self.is_load:
                self.values[where] = encode(current, keys, self._add_tensor)
            elif isinstance(place[0], tuple):
                raise CheckpointError("A value in a tuple cannot be filled in place", where=where, fix="Pass a list.")
            else:
                self.receivers[keys] = Receiver(lambda: current, partial(_replace, *place), is_value=True)
        elif isinstance(value, dict):
            self.add_dict(keys, value)
        elif isinstance(value, (list, tuple)):
            for number, member in enumerate(value):
                self.add((*keys, str(number)), member, (value, number))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(keys, value)
        else:
            self.objects[keys] = value

    def receiver(self, keys: Keys) -> Receiver | None:
        """Return the receiver of a stored value, such as optimizer state that a load creates.

        Args:
            keys: The value's keys in the checkpoint.
        """
        if len(keys) > 2 and keys[:-3] in self.optimizers:
            vacancy = self.optimizers[keys[:-3]].vacancy(*keys[-3:])
            if vacancy is not None:
                return vacancy
        return self.receivers.get(keys)

    def add_objects(self, files: Mapping[str, object] | None) -> None:
        """Add the objects: live tensors from modules and optimizers, and the state from all others.

        Frees gathered FSDP2 parameters first: only then does `named_parameters()` return the optimizers' parameters.
        For a save, add the caller's files for other programs, and those with which `from_pretrained` opens the model.

        Raises:
            CheckpointError: A value cannot be stored, or an optimizer has parameters outside the tree's modules; or see
                `folder_files`.
        """
        modules = {keys: module for keys, module in self.objects.items() if isinstance(module, nn.Module)}
        for keys, module in modules.items():
            refuse_flat_shards(keys, module)
            free_gathered_parameters(module)
        for keys, member in self.objects.items():
            if isinstance(member, nn.Module):
                for name, tensor in named_tensors(member):
                    self._add_tensor((*keys, name), tensor)
                refuse_own_entries(keys, member)
                for name, module in extra_states(member):
                    if not self.is_load or type(module).set_extra_state is not nn.Module.set_extra_state:
                        self._add_receiver((*keys, name), Receiver(module.get_extra_state, module.set_extra_state))
            elif isinstance(member, torch.optim.Optimizer):
                self._add_optimizer(keys, of_optimizer(keys, modules, member))
        for keys in sorted(self.objects):  # in the same order on all ranks, since objects may communicate
            member = self.objects[keys]
            if not isinstance(member, (nn.Module, torch.optim.Optimizer)):
                self._add_receiver(keys, Receiver(member.state_dict, member.load_state_dict))
        if not self.is_load:
            names = [keys[1] for keys in self.tensors if len(keys) == 2 and keys[0] == MODEL]
            self.form = form_of(self.objects.get((MODEL,), self.model), names)
            self.files = {**self.form.files, **folder_files(files)}

    def dtypes(self) -> dict[str, str]:
        """Return, by stored name, the dtype in memory for each tensor with another dtype in the files."""
        return {stored_name(keys)[1]: each.dtype for keys, each in self.tensors.items() if each.dtype is not None}

    def section(self) -> Section:
        """Return the values and the tensor descriptions."""
        tops = [(*keys, "state") for keys in self.optimizers]
        orders = {
            stored_name(keys)[1]: order
            for keys, stored in self.tensors.items()
            if any(keys[: len(top)] == top for top in tops) and (order := order_in_memory(stored.tensor))
        }
        return {
            "values": self.values,
            "groups": {
                pointer(keys): [{"names": group.names, "numbers": group.numbers} for group in optimizer.groups]
                for keys, optimizer in self.optimizers.items()
            },
            "optimizer": {pointer(keys): each.kind for keys, each in self.optimizers.items() if each.kind},
            "dtypes": self.dtypes(),
            "orders": orders,
        }

    def _add_tensor(self, keys: Keys, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """Add a tensor in storable form.

        Args:
            parameter: The parameter whose optimizer state this is.

        Raises:
            CheckpointError: The tensor's class keeps its memory elsewhere.
        """
        if (stored := resolve(tensor, partial(pointer, keys), parameter)) is not None:
            self.tensors[keys] = stored

    def _add_receiver(self, keys: Keys, receiver: Receiver) -> None:
        """Add a state as a single value with references to its tensors. A load passes it to the receiver at the end.

        Raises:
            CheckpointError: A value cannot be stored.
        """
        if self.is_load:
            self.receivers[keys] = receiver
        else:
            self.values[pointer(keys)] = encode(receiver.template(), keys, self._add_tensor)

    def _add_optimizer(self, keys: Keys, optimizer: OptimizerState) -> None:
        """Add an optimizer's tensors, and its other state as single values."""
        self.optimizers[keys] = optimizer
        for inner, container, key, owner in optimizer.slots:
            if isinstance(container[key], torch.Tensor):
                self._add_tensor(inner, container[key], owner)
            else:
                self._add_receiver(inner, Receiver(partial(container.get, key), partial(container.__setitem__, key)))


def _replace(container: Any, key: str | int, value: object) -> None:
    """Replace a value in its container. An instance of a custom dict class is updated in place."""
    current = container[key]
    if isinstance(value, dict) and isinstance(current, dict) and type(current) not in DICTS.values():
        current.update(value)
    else:
        container[key] = value


def _is_value(leaf: object, may_be_tensor: bool) -> bool:
    """Return whether a leaf may be part of a single value: it has no state of its own and is no shard."""
    if isinstance(leaf, torch.Tensor):
        return may_be_tensor and not is_sharded(leaf)
    return not is_stateful(leaf)


def tree_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, object] | None = None,
    *,
    rank: int = 0,
    per_rank: Mapping[str, object] | None = None,
    rng: LoadedRandomState = None,
    files: Mapping[str, object] | None = None,
    is_load: bool = False,
) -> Tree:
    """Return a model as `"model"`, its optimizer as `"optimizer"`, and the `state` values under their own keys.

    Args:
        rank: This rank.
        per_rank: This rank's own values.
        rng: Whether they include the random state. A load with `"if_same_ranks"` may leave it as it is.
        files: See `folder_files`.
        is_load: Whether to build the tree for a load, which replaces values in the dict `state` and passes objects
            their state.

    Raises:
        ConfigError: `rng` has an invalid value.
        CheckpointError: A value or the optimizer state cannot be stored, a key in `state` is reserved, or the optimizer
            has parameters outside the model.
    """
    arguments = (("state", state), ("per_rank", per_rank), (RNG, rng))
    declined = [name for name, value in arguments if value is not None and not value]
    is_valid = not isinstance(rng, str) or (is_load and rng == IF_SAME_RANKS)
    require("`rng`", is_valid, f'True, False or, for a load, "{IF_SAME_RANKS}"', rng)
    own_keys, given, own = (PER_RANK, str(rank)), _as_dict(state), _as_dict(per_rank)
    may_drop = rng == IF_SAME_RANKS and not per_rank
    tree = Tree(is_load, returns=True, given=given, declined=declined, may_drop_random_state=may_drop)
    tree.objects[MODEL,] = model
    if optimizer is not None:
        tree.objects[OPTIMIZER[:1]] = optimizer
    for keys, member in tree.objects.items():
        if not is_stateful(member):
            raise CheckpointError(
                "This is neither a model nor an optimizer",
                where=pointer(keys),
                found=type(member).__name__,
                fix="Pass the module or the optimizer itself; `save_state_dict` and `load_state_dict` take dicts.",
            )
    for argument, keys, members, names in (
        ("state", (), given, (MODEL, OPTIMIZER[0], PER_RANK)),
        ("per_rank", own_keys, own, (RNG,) if rng else ()),
    ):
        if reserved := [key for key in names if key in members]:
            raise CheckpointError(f"`{argument}` has a reserved key", found=", ".join(reserved), fix="Rename it.")
        tree.add_dict(keys, members)
    if rng:
        tree.objects[*own_keys, RNG] = RandomState()
    tree.add_objects(files)
    return tree


def _as_dict(values: Mapping[str, object] | None) -> dict[str, Any]:
    """Return the caller's own dict, in which a load replaces values, or a copy of another mapping."""
    return values if isinstance(values, dict) else dict(values or {})


def tree_of_dict(
    state_dict: object,
    *,
    model: nn.Module | None = None,
    files: Mapping[str, object] | None = None,
    is_load: bool = False,
) -> Tree:
    """Return the tree for a nested state dict and the objects in it.

    Args:
        model: Names the parameters in `optimizer.state_dict()`, which numbers them. A load frees its gathered ones.
        files: See `tree_of`, also for `is_load`.

    Raises:
        CheckpointError: See `Tree.add_dict` and `Tree.add_objects`.
    """
    if not isinstance(state_dict, dict):
        raise CheckpointError("A state dict is a dict", found=type(state_dict).__name__)
    if is_load and model is not None:
        free_gathered_parameters(model)
    tree = Tree(is_load, model=model)
    tree.add_dict((), state_dict)
    tree.add_objects(files)
    return tree
