"""Fills a nested state dict from a checkpoint: finds each leaf there, and replaces the values at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from reprise.errors import CheckpointError, MismatchError
from reprise.format.layout import TensorSpec
from reprise.format.names import STATE
from reprise.loading.loader import check_tensors
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.documents import StoredState, read_state
from reprise.nested.loaded import LoadedState, Strictness, log_names, log_options, log_unrequested
from reprise.nested.modules import Receiver
from reprise.nested.optimizers import ParameterGroup, saved_numbers
from reprise.nested.stored_names import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    Keys,
    is_random_state,
    keys_of,
    keys_of_pointer,
    pointer,
    stored_name,
)
from reprise.nested.table import JointTable
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf, TensorReference, insert_tensors, leaves, references
from reprise.storage.json_file import Json
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import Grid, LiveTensor, is_dtensor, local_of, locate
from reprise.tensors.modes import own_modes

_ABSENT = object()
_SMALL = 1 << 20  # elements that any parameter's state may have

Make = Callable[[TensorSpec, str | None], torch.Tensor]


class Filling:
    """Loads a checkpoint into a nested state dict, on a single rank.

    Args:
        tree: This rank's tree to fill.
        tensors: This rank's tensors, with the ranks holding the same boxes.
        joint: The table for all ranks.
    """

    def __init__(
        self, tree: Tree, tensors: Sequence[LiveTensor], joint: JointTable, strict: Strictness, checkpoint: Checkpoint
    ) -> None:
        self._tree, self._own, self._joint, self._strict, self._checkpoint = tree, tensors, joint, strict, checkpoint
        self._stored, self._places = read_state(checkpoint), read_places(checkpoint)
        self._aliases = checkpoint.manifest.aliases
        names = {*self._places, *self._aliases}
        self._modules = ((MODEL,), *(at for at, member in tree.objects.items() if isinstance(member, nn.Module)))
        self._other_names = {
            name: alias for alias, name in joint.aliases.items() if alias in names and name not in names
        }
        self._missing, self._unexpected = list[str](), list[str]()
        self._values = dict[str, Any]()  # by JSON Pointer, the tree's new values, with tensor references
        self._tensors = dict[str, torch.Tensor]()  # the tensors in the values, by stored name
        self._new = list[LiveTensor]()  # their parts to fill
        self._receivers = list[tuple[str, Receiver]]()
        self._copies = list[Callable[[], None]]()
        self._numbers = list[tuple[ParameterGroup, Json]]()
        self._unrequested = ByLeaf()
        # By stored name, the tensors to which new optimizer state may be tied.
        self._tied = {stored_name(keys)[1]: each.tensor for keys, each in tree.tensors.items() if tree.optimizers}

    @own_modes()
    def live(self) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in the checkpoint.

        Raises:
            MismatchError: Lists the mismatched names and tensors.
        """
        joint, places, stored = self._joint, self._places, self._stored
        missing = [*self._take_optimizers(), *self._take_states()]
        if self._tree.returns_unrequested:
            self._take_unrequested({MODEL, OPTIMIZER[0], PER_RANK, *joint.entries})
        own_tensors = self._own_tensors()
        lacking = {tensor.spec.name for tensor in own_tensors if tensor.spec.name not in places}
        pointers = joint.values | self._values.keys()
        values = [value for where in pointers if type(value := stored.at(keys_of_pointer(where))) is not ByLeaf]
        requested = {self._aliases.get(each.name, each.name) for value in values for each in references(value)}
        requested |= {tensor.spec.name for tensor in (*own_tensors, *self._new)}
        requested |= {self._target(spec.name) for spec in joint.specs}
        unexpected = {name: keys_of(place.spec.kind, name) for name, place in places.items() if name not in requested}
        unexpected |= {pointer(keys): keys for keys in sorted(_unrequested_values(stored, pointers), key=pointer)}
        unexpected = {name: keys for name, keys in unexpected.items() if self._is_covered(keys)}
        problems = [f"{name} is missing" for name in missing if self._is_refused(keys_of_pointer(name))]
        if self._strict != "missing":
            problems += [f"{name} is unexpected" for name, keys in unexpected.items() if self._is_refused(keys)]
        tensors = [
            tensor
            for tensor in (*own_tensors, *self._new)
            if (spec := tensor.spec).name not in lacking or self._is_refused(keys_of(spec.kind, spec.name))
        ]
        specs = [tensor.spec for tensor in tensors]
        check_tensors(specs, places, where=self._checkpoint.path, is_partial=True, further=problems)
        names = [tensor.spec.name for tensor in own_tensors if tensor.spec.name in lacking]
        self._missing, self._unexpected = [*names, *missing], list(unexpected)
        return tensors

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. Calling it twice has the same effect.

        Raises:
            MismatchError: An object refuses its state, or a module does not know an entry.
        """
        tree = self._tree
        with own_modes():  # increases all version counters, for DTensors and tied tensors too
            torch.autograd.graph.increment_version([stored.tensor for stored in tree.tensors.values()])
            tree.put_tensors(self._missing)
            for group, numbers in self._numbers:
                group.replace(numbers)
            for copy in (*(stored.copy_back for stored in tree.tensors.values()), *self._copies):
                if copy is not None:
                    copy()
        for where, receiver in self._receivers:  # outside `own_modes`: this is the caller's code
            receiver.load(where, insert_tensors(self._values[where], self._tensors))
        unknown = [name for entries in tree.modules.values() for name in entries.load()]
        if unknown and self._strict in (True, "model"):
            raise MismatchError(
                "A module does not know entries of the checkpoint's state dict",
                found=", ".join(unknown),
                fix='Build it as it was when the checkpoint was saved, or pass strict="missing".',
            )
        self._unexpected = list(dict.fromkeys((*self._unexpected, *unknown)))

    def result(self, *, is_first: bool) -> LoadedState:
        """Log the names missing on a side, and return the load's result.

        Args:
            is_first: Whether this rank logs the lines common to all ranks.
        """
        checkpoint, values = self._checkpoint, insert_tensors(self._unrequested, self._tensors)
        result = LoadedState({**values, "iteration": checkpoint.iteration}, self._missing, self._unexpected)
        log_names(checkpoint.path, result, is_first=is_first)
        if is_first:
            log_unrequested(checkpoint.path, self._stored, self._tree, self._joint.entries, values)
            log_options(checkpoint.path, self._numbers)
        return result

    def _is_covered(self, keys: Keys) -> bool:
        """Return whether the load covers a name in the checkpoint."""
        return keys[0] in self._joint.entries and not ("rng" in self._tree.declined and is_random_state(keys))

    def _is_refused(self, keys: Keys) -> bool:
        """Return whether the load refuses a name missing on the other side."""
        is_of_model = any(keys[: len(module)] == module for module in self._modules)
        return self._strict is not False and (self._strict != "model" or is_of_model)

    def _target(self, name: str) -> str:
        """Return the name under which the checkpoint stores a rank's tensor. A tied tensor's may be another."""
        name = self._other_names.get(name, name)
        return self._aliases.get(name, name)

    def _own_tensors(self) -> list[LiveTensor]:
        """Return the tree's tensors to fill, under their names in the checkpoint.

        Raises:
            MismatchError: A tensor's saved dtype differs, and safetensors lacks the saved or the current dtype.
        """
        dtypes, saved_dtypes = self._tree.dtypes(), self._stored.dtypes
        replaced = {stored_name(keys_of_pointer(where))[1] for where in self._values}
        meta_names = {stored_name(keys)[1] for keys in self._tree.meta}
        own_tensors = []
        for tensor in self._own:
            spec, name = tensor.spec, self._target(tensor.spec.name)
            if spec.name in replaced:
                continue
            if name in self._places and dtypes.get(spec.name) != saved_dtypes.get(name):
                saved_dtype = self._places[name].spec.dtype
                raise MismatchError(
                    "A tensor has another dtype in the checkpoint",
                    where=f"{self._checkpoint.path}, {name}",
                    expected=dtypes.get(spec.name, saved_dtype),
                    found=saved_dtypes.get(name, saved_dtype),
                )
            own_tensors.append(replace(tensor, spec=replace(spec, name=name), is_new=spec.name in meta_names))
        return own_tensors

    def _take_optimizers(self) -> Iterator[str]:
        """Take the optimizers' missing state, and the groups' hyperparameters. Yield what the checkpoint lacks.

        Raises:
            MismatchError: A group's parameters had different hyperparameters, or a group with tensors had another
                place.
        """
        own_names = frozenset(self._tied)
        for where, optimizer in self._tree.optimizers.items():
            top = keys_of_pointer(where)
            elements = sum(parameter.numel() for parameter in optimizer.parameters.values())
            filled_groups = set[str]()
            for kind in ("state", "param_groups"):
                for name, _ in self._stored.members(*top, kind):
                    for key, value in self._stored.members(*top, kind, name):
                        keys, is_tensor = (*top, kind, name, key), isinstance(value, TensorReference)
                        vacancy = optimizer.vacancy(kind, name, key)
                        if vacancy is None or (is_tensor and (keys in self._tree.tensors or value.name in own_names)):
                            continue
                        on_host = is_tensor and key == "step" and not optimizer.steps_on_device
                        make = partial(self._made_for, vacancy[0], elements, on_host)
                        self._take(pointer(keys), value, Receiver(list, vacancy[1]), make)
                        filled_groups.add(pointer(keys[:-1]))
            groups = self._stored.groups.get(where, ())
            saved = {
                name: (group.get("place", number), group["numbers"])
                for number, group in enumerate(groups)
                for name in group["names"]
            }
            for number, group in enumerate(optimizer.groups):
                if not group.names:  # an empty group takes the hyperparameters of an empty group at its place
                    is_there = number < len(groups) and not groups[number]["names"]
                    self._numbers += [(group, groups[number]["numbers"])] if is_there else []
                    continue
                at = f"{where}/param_groups/{number}"
                has_tensors = any(isinstance(value, torch.Tensor) for value in group.live.values())
                place = number if has_tensors or at in filled_groups else None
                numbers = saved_numbers(at, group, saved, place, is_strict=self._strict in (True, "missing"))
                if numbers is None:
                    yield at
                    continue
                self._numbers.append((group, numbers))
                lacking = group.numbers.keys() - numbers.keys() - group.defaults
                yield from (at + pointer((key,)) for key in group.numbers if key in lacking)

    def _take_states(self) -> Iterator[str]:
        """Take values, objects' states and modules' extra entries. Yield what the checkpoint lacks.

        An empty dict receives a saved dict's values, except those requested separately by a rank.
        """
        for where, receiver in (self._tree.receivers | self._new_entries()).items():
            keys = keys_of_pointer(where)
            value = self._stored.at(keys, _ABSENT)
            if receiver.is_value and (value is _ABSENT or type(value) is ByLeaf):
                current = receiver.template()
                if not isinstance(current, dict) or current:
                    yield where
                elif value is not _ABSENT:
                    value = _part(value, keys, lambda at, v: pointer(at) in self._joint.values or any(references(v)))
                    self._take(where, value, receiver)
            elif value is _ABSENT:
                yield where
            elif where not in self._values:  # unless an optimizer takes it
                self._take(where, value, receiver)

    def _new_entries(self) -> dict[str, Receiver]:
        """Return receivers for entries created at a module's first use."""
        receivers: dict[str, Receiver] = {}
        for (keys, prefix), entries in self._tree.modules.items():  # outer modules before inner modules
            for name, value in self._stored.members(*keys):
                where, is_tensor = pointer((*keys, name)), isinstance(value, TensorReference) and value.is_implied
                if name.startswith(prefix) and not is_tensor and where not in self._tree.receivers:
                    receivers[where] = entries.receiver(name)
        return receivers

    def _take_unrequested(self, excluded: Collection[str]) -> None:
        """Take the values under all outermost keys except some. Skip DTensors, and tensors stored by leaf."""
        members = ByLeaf({key: member for key, member in self._stored.root.items() if key not in excluded})
        self._unrequested = _part(members, (), lambda _, v: any(at.is_sharded or at.is_implied for at in references(v)))
        self._allocate(self._unrequested, {}, None)

    def _take(self, where: str, value: Any, receiver: Receiver, make: Make | None = None) -> None:
        """Take a value and create its tensors. DTensors in the current value are filled in place.

        Args:
            make: Returns memory for a tensor.
        """
        current: dict[str, torch.Tensor] = {}
        if any(references(value)):
            old = receiver.template()
            value = _shaped_like(old, value)
            for keys, leaf in leaves(old, keys_of_pointer(where)):
                if isinstance(leaf, torch.Tensor):
                    current[stored_name(keys)[1]] = leaf
        self._values[where] = value
        self._receivers.append((where, receiver))
        self._allocate(value, current, make)

    def _allocate(self, value: object, current: Mapping[str, torch.Tensor], make: Make | None) -> None:
        """Create a value's tensors, except an object's current DTensors and tensors tied to others.

        Raises:
            CheckpointError: The checkpoint lacks a tensor.
        """
        for name in [reference.name for reference in references(value)]:
            target, dtype, tensor = self._aliases.get(name, name), self._stored.dtypes.get(name), current.get(name)
            if make is not None and target in self._tied:
                self._tensors[name] = in_memory(self._tied[target].detach(), dtype)
                continue
            if target not in self._places:
                where = f"{self._checkpoint.path / STATE}, {name}"
                raise CheckpointError("A value refers to a tensor that the checkpoint lacks", where=where)
            spec = self._places[target].spec
            is_new = make is not None or tensor is None or not is_dtensor(tensor)
            if make is not None:
                tensor = make(spec, dtype)
            elif tensor is None or is_new:
                device = torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
                tensor = in_memory(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device), dtype)
            self._tensors[name] = tensor.detach()
            form = resolve(tensor, partial(str, name))
            if form is None:
                continue
            self._copies += [] if form.copy_back is None else [form.copy_back]
            if make is not None:
                self._tied[target] = form.tensor
            # Other ranks' copies are not compared.
            parts = locate(spec.kind, target, form.tensor, grid=Grid.flat(1))
            self._new += [replace(part, replicas=(), is_new=is_new) for part in parts]

    def _made_for(
        self, parameter: nn.Parameter, elements: int, on_host: bool, spec: TensorSpec, dtype: str | None
    ) -> torch.Tensor:
        """Return memory for a parameter's optimizer state, placed as optimizers place it.

        Args:
            elements: The element count for all the optimizer's parameters. Flat state for all may be stored under the
                first.
            on_host: Whether the state is a step counter on the host.
            spec: The state's spec in the files.
            dtype: The state's dtype in memory. None for its dtype in the files.

        Raises:
            MismatchError: The state is larger than a square matrix over all elements, the largest state optimizers
                have. A checkpoint must not claim unlimited memory.
        """
        kind = torch_dtype(spec.dtype) if dtype is None else getattr(torch, dtype)
        shape = spec.shape[:-1] if dtype is not None and kind.is_complex else spec.shape
        most = max(elements**2, _SMALL)
        if math.prod(shape) > most:
            raise MismatchError(
                "The checkpoint has optimizer state that is too large for its parameter",
                where=f"{self._checkpoint.path}, tensor {spec.name}",
                expected=f"at most {most} elements",
                found=f"shape {list(shape)}",
                fix="Load the model alone.",
            )
        order = self._stored.orders.get(spec.name, [])[: len(shape)]
        is_ordered = bool(order) and len(order) == len(shape) and not is_dtensor(parameter)
        if not is_ordered and not on_host and shape == tuple(parameter.shape):
            return torch.zeros_like(parameter.detach(), dtype=kind)
        device = torch.device("cpu") if on_host else local_of(parameter).device
        if not is_ordered:
            return torch.zeros(shape, dtype=kind, device=device)
        outermost_first = torch.zeros([shape[dim] for dim in order], dtype=kind, device=device)
        return outermost_first.permute([order.index(dim) for dim in range(len(shape))])


def _unrequested_values(stored: StoredState, pointers: Collection[str]) -> Iterator[Keys]:
    """Yield the keys for a checkpoint's values outside these pointers.

    A value containing tensors or requested members is split: a template finds a tensor in a list by its name, and a
    number beside it as a separate value.
    """
    parents = {pointer(keys[:count]) for keys in map(keys_of_pointer, pointers) for count in range(len(keys))}

    def unrequested(value: object, keys: Keys) -> Iterator[Keys]:
        where = pointer(keys)
        if where in pointers or isinstance(value, TensorReference):
            return
        if isinstance(value, (list, tuple)) and (where in parents or any(references(value))):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, member in value.items():
                yield from unrequested(member, (*keys, str(key)))
        else:
            yield keys

    return unrequested(stored.root, ())


def _part(value: Any, keys: Keys, is_excluded: Callable[[Keys, object], bool]) -> Any:
    """Return a value without some values in its dicts by leaf, and without dicts left empty."""
    if type(value) is not ByLeaf:
        return value
    part = ByLeaf()
    for key, member in value.items():
        inner = _part(member, (*keys, key), is_excluded)
        if inner if type(inner) is ByLeaf else not is_excluded((*keys, key), member):
            part[key] = inner
    return part


def _shaped_like(template: object, value: Any) -> Any:
    """Return a value stored by leaf with a template's lists and tuples, and with keys in its order."""
    if type(value) is not ByLeaf:
        return value
    if isinstance(template, (list, tuple)) and value.keys() == {str(number) for number in range(len(value))}:
        members = [*template, *[None] * len(value)]
        return type(template)(_shaped_like(members[number], value[str(number)]) for number in range(len(value)))
    if not isinstance(template, dict):
        return value
    keys = [*(key for key in template if key in value), *(key for key in value if key not in template)]
    return ByLeaf({key: _shaped_like(template.get(key), value[key]) for key in keys})
