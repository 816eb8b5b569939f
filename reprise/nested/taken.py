"""What a load takes from a checkpoint beside the tensors of its tree: values, state of objects, new tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.layout import TensorSpec
from reprise.format.names import STATE
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.documents import StoredState
from reprise.nested.loaded import Strictness
from reprise.nested.modules import Receiver
from reprise.nested.optimizer_state import zeros_for
from reprise.nested.optimizers import SavedGroups
from reprise.nested.stored_names import Keys, keys_of_pointer, pointer, stored_name
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf, TensorReference, leaves, put_back, references
from reprise.storage.json_file import Json
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import Grid, LiveTensor, is_dtensor, locate

_ABSENT = object()

Make = Callable[[TensorSpec, str | None], torch.Tensor]


class Taken:
    """What a tree takes from the checkpoint at hand, and puts in place at the end of the load.

    Attributes:
        stored: the state of the checkpoint.
        values: by JSON Pointer, with references to tensors.
        new: the tensors of the values, to be filled.
        numbers: by the pointer of a parameter group, its numbers.
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredState, tree: Tree) -> None:
        self.stored, self.values, self.numbers = stored, dict[str, Any](), dict[str, Json]()
        self.new: list[LiveTensor] = []
        self._checkpoint, self._tree = checkpoint, tree
        self._places, self._aliases = read_places(checkpoint), checkpoint.manifest.aliases
        self._tensors: dict[str, torch.Tensor] = {}  # of the values, by stored name
        self._puts: list[tuple[str, Callable[[Any], object]]] = []
        self._receivers: list[tuple[str, Receiver]] = []
        self._copies: list[Callable[[], None]] = []
        self._rest = ByLeaf()
        # By stored name, the tensors with which new state of an optimizer may be tied.
        self._tied = {stored_name(keys)[1]: each.tensor for keys, each in tree.tensors.items() if tree.optimizers}

    def target(self, name: str) -> str:
        """Return the name under which a tensor is stored."""
        return self._aliases.get(name, name)

    def other_names(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return a stored name for each tied tensor whose first name is missing in the checkpoint."""
        stored = {*self._places, *self._aliases}
        return {name: alias for alias, name in aliases.items() if name not in stored and alias in stored}

    def own_tensors(self, tensors: Sequence[LiveTensor], other_names: Mapping[str, str]) -> list[LiveTensor]:
        """Return the tensors of the tree that are filled, under their names in the checkpoint.

        Raises:
            MismatchError: for one with another dtype in memory than in the checkpoint, and the same in the files.
        """
        dtypes = self._tree.dtypes()
        replaced = {stored_name(keys_of_pointer(where))[1] for where, _ in self._puts}
        meta_names = {stored_name(keys)[1] for keys in self._tree.meta}
        own_tensors = []
        for tensor in tensors:
            name = other_names.get(tensor.spec.name, tensor.spec.name)
            if tensor.spec.name in replaced:
                continue
            place = self._places.get(self.target(name))
            if place is not None and dtypes.get(name) != self.stored.dtypes.get(place.spec.name):
                raise MismatchError(
                    "A tensor has another dtype in the checkpoint",
                    where=f"{self._checkpoint.path}, {name}",
                    expected=dtypes.get(name, place.spec.dtype),
                    found=self.stored.dtypes.get(place.spec.name, place.spec.dtype),
                )
            is_new = tensor.spec.name in meta_names
            own_tensors.append(replace(tensor, spec=replace(tensor.spec, name=name), is_new=is_new))
        return own_tensors

    def take_optimizers(self, strict: Strictness) -> Iterator[str]:
        """Take the state that optimizers lack, and the numbers of groups; yield the numbers that the checkpoint lacks.

        Raises:
            MismatchError: for a group whose parameters were in groups of different numbers, and for a group of tensors
                from another place.
        """
        own_names = frozenset(self._tied)
        for where, optimizer in self._tree.optimizers.items():
            top = keys_of_pointer(where)
            elements = sum(parameter.numel() for parameter in optimizer.parameters.values())
            make = partial(zeros_for, orders=self.stored.orders, elements=elements, where=self._checkpoint.path)
            for keys, value in self._optimizer_members(top):
                is_tensor = isinstance(value, TensorReference)
                vacancy = optimizer.vacancy(*keys[len(top) :])
                if vacancy is not None and not (is_tensor and (keys in self._tree.tensors or value.name in own_names)):
                    parameter, put = vacancy
                    on_host = is_tensor and keys[-1] == "step" and not optimizer.steps_on_device
                    self._take(pointer(keys), value, list, partial(make, parameter, on_host=on_host))
                    self._puts.append((pointer(keys), put))
            new_places = {keys_of_pointer(at)[:-1] for at, _ in self._puts}
            saved = SavedGroups(self.stored.groups.get(where, ()))
            for number, group in enumerate(optimizer.groups):
                at = f"{where}/param_groups/{number}"
                has_tensors = any(isinstance(value, torch.Tensor) for value in group.given.values())
                has_place = has_tensors or keys_of_pointer(at) in new_places
                is_strict = strict in (True, "missing")
                numbers = saved.numbers(at, group, number, is_strict=is_strict, has_place=has_place)
                if numbers is None:
                    yield at
                    continue
                self.numbers[at] = numbers
                lacking = group.numbers.keys() - numbers.keys() - group.defaults
                yield from (at + pointer((key,)) for key in group.numbers if key in lacking)

    def take_values(self, requested: Collection[str]) -> Iterator[str]:
        """Take the values of the tree; yield those that the checkpoint lacks.

        An empty dict takes the values of a dict, except those requested by a rank.
        """
        for where, current in self._tree.values.items():
            keys = keys_of_pointer(where)
            value = self.stored.at(keys, _ABSENT)
            if type(value) is ByLeaf and current == {}:
                value = _part(value, keys, lambda inner, v: pointer(inner) in requested or any(references(v)))
            elif value is _ABSENT or type(value) is ByLeaf:
                if current != {}:
                    yield where
                continue
            self._take(where, value)

    def take_states(self) -> Iterator[str]:
        """Take the state of objects, and what modules have beyond their tensors; yield what the checkpoint lacks."""
        receivers = self._tree.receivers | self._new_entries()
        for where, receiver in receivers.items():
            value = self.stored.at(keys_of_pointer(where), _ABSENT)
            if value is _ABSENT:
                yield where
            elif where not in self.values:  # which an optimizer puts in place
                self._take(where, value, receiver.template)
                self._receivers.append((where, receiver))

    def take_rest(self, left_out: Collection[str]) -> None:
        """Take the values under all outermost keys but some: no DTensors, and no tensors stored by leaf."""
        members = ByLeaf({key: member for key, member in self.stored.root.items() if key not in left_out})
        self._rest = _part(members, (), lambda _, v: any(at.is_sharded or at.is_implied for at in references(v)))
        self._allocate_all(self._rest, {}, None)

    def rest(self) -> dict[str, Any]:
        """Return the values of `take_rest`."""
        return dict(put_back(self._rest, self._tensors))

    def put(self) -> None:
        """Put values, new state of optimizers and the numbers of their groups in place."""
        for where in self._tree.values.keys() & self.values.keys():
            self._tree.replace_value(where, self._value(where))
        for where, put in self._puts:
            put(self._value(where))
        for where, optimizer in self._tree.optimizers.items():
            for number, group in enumerate(optimizer.groups):
                group.replace(self.numbers.get(f"{where}/param_groups/{number}", {}))
        for copy in (*(stored.copy_back for stored in self._tree.tensors.values()), *self._copies):
            if copy is not None:
                copy()

    def give(self) -> None:
        """Give objects and modules their state.

        Raises:
            MismatchError: if one does not take it.
        """
        for where, receiver in self._receivers:
            receiver.give(where, self._value(where))

    def _value(self, where: str) -> Any:
        return put_back(self.values[where], self._tensors)

    def _optimizer_members(self, top: Keys) -> Iterator[tuple[Keys, Any]]:
        for kind in ("state", "param_groups"):
            for name, _ in self.stored.members(*top, kind):
                yield from ((((*top, kind, name, key), value) for key, value in self.stored.members(*top, kind, name)))

    def _new_entries(self) -> dict[str, Receiver]:
        """Return receivers of what modules lack before their first use."""
        receivers: dict[str, Receiver] = {}
        for keys in dict.fromkeys(keys for keys, _ in self._tree.modules):
            for name, value in self.stored.members(*keys):
                prefixes = ("", *(name[: at + 1] for at, letter in enumerate(name) if letter == "."))
                parts = [
                    self._tree.modules[keys, prefix] for prefix in prefixes if (keys, prefix) in self._tree.modules
                ]
                where, is_tensor = pointer((*keys, name)), isinstance(value, TensorReference) and value.is_implied
                if parts and not is_tensor and where not in self._tree.receivers:
                    receivers[where] = parts[-1].receiver(name)
        return receivers

    def _take(
        self, where: str, value: Any, template: Callable[[], Any] | None = None, make: Make | None = None
    ) -> None:
        """Take a value, with new tensors in it.

        Args:
            template: returns the current value, whose DTensors are filled in place.
            make: returns memory for a tensor.
        """
        current: dict[str, torch.Tensor] = {}
        if template is not None and any(references(value)):
            old = template()
            value = _shaped_like(old, value)
            for keys, leaf in leaves(old, keys_of_pointer(where)):
                if isinstance(leaf, torch.Tensor):
                    current[stored_name(keys)[1]] = leaf
        self.values[where] = value
        self._allocate_all(value, current, make)

    def _allocate_all(self, value: object, current: Mapping[str, torch.Tensor], make: Make | None) -> None:
        for name in [reference.name for reference in references(value)]:
            self._allocate(name, current.get(name), make)

    def _allocate(self, name: str, tensor: torch.Tensor | None, make: Make | None) -> None:
        """Make a tensor of a value, unless it is the current DTensor of an object, or tied to another."""
        target, dtype = self.target(name), self.stored.dtypes.get(name)
        if make is not None and target in self._tied:
            self._tensors[name] = in_memory(self._tied[target].detach(), dtype)
            return
        if target not in self._places:
            where = f"{self._checkpoint.path / STATE}, {name}"
            raise CheckpointError("A value refers to a tensor that the checkpoint lacks", where=where)
        spec, form = self._places[target].spec, None
        if make is not None:
            tensor = make(spec, dtype)
        if tensor is not None and (make is not None or is_dtensor(tensor)):
            form = resolve(tensor, partial(str, name))
        if tensor is not None and form is not None:
            stored, self._tensors[name] = form.tensor, tensor.detach()
            self._copies += [] if form.copy_back is None else [form.copy_back]
        else:
            device = torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
            stored = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            self._tensors[name] = in_memory(stored, dtype)
        if make is not None:
            self._tied[target] = stored
        # The copies of other ranks are not compared.
        parts = locate(spec.kind, name, stored, grid=Grid.flat(1))
        is_new = make is not None or form is None
        self.new += [replace(part, replicas=(), is_new=is_new) for part in parts]


def _part(value: Any, keys: Keys, is_left_out: Callable[[Keys, object], bool]) -> Any:
    """Return a value without some of the values in its dicts by leaf, and without dicts that have no others."""
    if type(value) is not ByLeaf:
        return value
    part = ByLeaf()
    for key, member in value.items():
        inner = (*keys, key)
        if type(member) is ByLeaf or not is_left_out(inner, member):
            part[key] = _part(member, inner, is_left_out)
    return ByLeaf({key: member for key, member in part.items() if type(member) is not ByLeaf or member})


def _shaped_like(template: object, value: Any) -> Any:
    """Return a value that was stored by leaf with the lists and tuples of a template, and keys in its order."""
    if type(value) is not ByLeaf:
        return value
    if isinstance(template, (list, tuple)) and value.keys() == {str(number) for number in range(len(value))}:
        members = [*template, *[None] * len(value)]
        return type(template)(_shaped_like(members[number], value[str(number)]) for number in range(len(value)))
    if not isinstance(template, dict):
        return value
    keys = [*(key for key in template if key in value), *(key for key in value if key not in template)]
    return ByLeaf({key: _shaped_like(template.get(key), value[key]) for key in keys})
