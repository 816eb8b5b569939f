"""Fills a nested state dict from a checkpoint: finds each leaf there, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
from reprise.nested.loaded import LoadedState, Strictness, log_names, log_unrequested
from reprise.nested.modules import Receiver
from reprise.nested.optimizers import saved_numbers
from reprise.nested.stored_names import (
    ANY,
    MODEL,
    OPTIMIZER,
    PER_RANK,
    RNG,
    Keys,
    is_random_state,
    keys_of,
    keys_of_pointer,
    pointer,
    stored_name,
)
from reprise.nested.table import JointTable
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf, TensorReference, insert_tensors, leaves, references, shaped_like
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import LiveTensor, is_sharded, local_of
from reprise.tensors.modes import own_modes

_ABSENT = object()

Vacancy = tuple[nn.Parameter, bool]  # a parameter, and whether its state is a step counter on the host


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
        self._other_names = {
            name: alias for alias, name in joint.aliases.items() if alias in names and name not in names
        }
        self._missing, self._unexpected = list[str](), list[str]()
        # By JSON Pointer, the new values, with tensor references, and their receivers.
        self._taken = dict[str, tuple[Any, Receiver]]()
        self._tensors = dict[str, torch.Tensor]()  # the tensors in the values, by stored name
        self._new = list[LiveTensor]()  # their parts to fill
        self._copies = list[Callable[[], None]]()
        self._returned = dict[str, Any]()
        # By stored name, the tensors to which new optimizer state may be tied.
        self._tied = {stored_name(keys)[1]: each.tensor for keys, each in tree.tensors.items() if tree.optimizers}

    @own_modes()
    def live(self) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in the checkpoint.

        Raises:
            MismatchError: Lists the mismatched names and tensors.
        """
        joint, places, stored = self._joint, self._places, self._stored
        missing = {name: keys_of_pointer(name) for name in (*self._take_optimizers(), *self._take_states())}
        if self._tree.returns_unrequested:
            self._take_unrequested({MODEL, OPTIMIZER[0], PER_RANK, *joint.entries})
        own_tensors = self._own_tensors()
        specs = [tensor.spec for tensor in own_tensors if tensor.spec.name not in places]
        missing = {spec.name: keys_of(spec.kind, spec.name) for spec in specs} | missing
        pointers = joint.values | self._taken.keys()
        values = [value for where in pointers if type(value := stored.at(keys_of_pointer(where))) is not ByLeaf]
        requested = {self._aliases.get(each.name, each.name) for value in values for each in references(value)}
        requested |= {tensor.spec.name for tensor in self._new} | {self._target(spec.name) for spec in joint.specs}
        unexpected = {name: keys_of(place.spec.kind, name) for name, place in places.items() if name not in requested}
        unexpected |= {pointer(keys): keys for keys in sorted(_unrequested_values(stored, pointers), key=pointer)}
        unexpected = {name: keys for name, keys in unexpected.items() if self._is_unexpected(keys)}
        sides = [("missing", missing), ("unexpected", unexpected if self._strict != "missing" else {})]
        problems = [f"{n} is {side}" for side, names in sides for n, keys in names.items() if self._is_refused(keys)]
        tensors = [tensor for tensor in (*own_tensors, *self._new) if tensor.spec.name in places]
        where = self._checkpoint.path
        check_tensors([tensor.spec for tensor in tensors], places, where=where, is_partial=True, further=problems)
        self._missing, self._unexpected = list(missing), list(unexpected)
        return tensors

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. Calling it twice has the same effect.

        Raises:
            MismatchError: An object refuses its state, or a module does not know an entry.
        """
        tree = self._tree
        with own_modes():  # increases all version counters, for DTensors and tied tensors too
            torch.autograd.graph.increment_version([stored.tensor for stored in tree.tensors.values()])
            for copy in (*(stored.copy_back for stored in tree.tensors.values()), *self._copies):
                if copy is not None:
                    copy()
        for where, (value, receiver) in self._taken.items():  # outside `own_modes`: this is the caller's code
            receiver.load(where, insert_tensors(value, self._tensors))
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
        checkpoint, values = self._checkpoint, self._returned
        result = LoadedState({**values, "iteration": checkpoint.iteration}, self._missing, self._unexpected)
        log_names(checkpoint.path, result, is_first=is_first)
        if is_first:
            log_unrequested(checkpoint.path, self._stored, self._tree, self._joint.entries, values)
        return result

    def _is_unexpected(self, keys: Keys) -> bool:
        """Return whether the load covers an unrequested name in the checkpoint, and no rank creates state there."""
        is_created = f"{pointer(keys[:-1])}{ANY}" in self._joint.values
        return keys[0] in self._joint.entries and not self._is_declined(keys) and not is_created

    def _is_declined(self, keys: Keys) -> bool:
        """Return whether the load leaves random state as it is."""
        return RNG in self._tree.declined and is_random_state(keys)

    def _is_refused(self, keys: Keys) -> bool:
        """Return whether the load refuses a name missing on the other side."""
        modules = [at for at, member in self._tree.objects.items() if isinstance(member, nn.Module)]
        is_of_model = any(keys[: len(at)] == at for at in ((MODEL,), *modules))
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
        replaced = {stored_name(keys_of_pointer(where))[1] for where in self._taken}
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
            own_tensors.append(replace(tensor, spec=replace(spec, name=name)))
        return own_tensors

    def _take_optimizers(self) -> Iterator[str]:
        """Take the optimizers' missing state, and the groups' hyperparameters. Yield what the checkpoint lacks.

        Raises:
            MismatchError: A group with tensors had another place.
        """
        own_names = frozenset(self._tied)
        for where, optimizer in self._tree.optimizers.items():
            top = keys_of_pointer(where)
            for kind in ("state", "param_groups"):
                for name, _ in self._stored.members(*top, kind):
                    for key, value in self._stored.members(*top, kind, name):
                        keys, is_tensor = (*top, kind, name, key), isinstance(value, TensorReference)
                        vacancy = optimizer.vacancy(kind, name, key)
                        if vacancy is None or (is_tensor and (keys in self._tree.tensors or value.name in own_names)):
                            continue
                        on_host = is_tensor and key == "step" and not optimizer.steps_on_device
                        self._take(pointer(keys), value, Receiver(list, vacancy[1]), (vacancy[0], on_host))
            saved = {
                name: (group.get("place", number), group["numbers"])
                for number, group in enumerate(self._stored.groups.get(where, ()))
                for name in group["names"]
            }
            for number, group in [row for row in enumerate(optimizer.groups) if row[1].names]:
                at = f"{where}/param_groups/{number}"
                place = number if any(self._stored.members(*keys_of_pointer(at))) else None  # its tensors are there
                numbers = saved_numbers(at, group, saved, place)
                if numbers is None:
                    yield at
                else:
                    self._take(at, numbers, Receiver(dict, group.replace))
                    lacking = group.numbers.keys() - numbers.keys() - group.defaults
                    yield from (at + pointer((key,)) for key in group.numbers if key in lacking)

    def _take_states(self) -> Iterator[str]:
        """Take values, objects' states and modules' extra entries. Yield what the checkpoint lacks.

        An empty dict receives a saved dict's values without its tensors.
        """
        for where, receiver in (self._tree.receivers | self._new_entries()).items():
            keys = keys_of_pointer(where)
            if self._is_declined(keys):
                continue
            value = self._stored.at(keys, _ABSENT)
            if receiver.is_value and (value is _ABSENT or type(value) is ByLeaf):
                current = receiver.template()
                if not isinstance(current, dict) or current:
                    yield where
                elif value is not _ABSENT:
                    self._take(where, _without_tensors(value), receiver)
            elif value is _ABSENT:
                yield where
            elif where not in self._taken:  # unless an optimizer takes it
                self._take(where, value, receiver)

    def _new_entries(self) -> dict[str, Receiver]:
        """Return receivers for entries created at a module's first use."""
        receivers: dict[str, Receiver] = {}
        for (keys, prefix), entries in self._tree.modules.items():  # outer modules before inner modules
            for name, value in self._stored.members(*keys):
                where = pointer((*keys, name))
                if name.startswith(prefix) and not _is_implied(value) and where not in self._tree.receivers:
                    receivers[where] = entries.receiver(name)
        return receivers

    def _take_unrequested(self, excluded: Collection[str]) -> None:
        """Return the values under all outermost keys except some, without tensors stored by leaf.

        A key's values stay out if they include sharded tensors.
        """
        for key, value in _without_tensors(self._stored.root).items():
            if key not in excluded and not any(reference.is_sharded for reference in references(value)):
                self._take(pointer((key,)), value, Receiver(dict, partial(self._returned.__setitem__, key)))

    def _take(self, where: str, value: Any, receiver: Receiver, vacancy: Vacancy | None = None) -> None:
        """Take a value and create its tensors. Sharded tensors in the current value are filled in place.

        Args:
            vacancy: The place of new optimizer state.
        """
        current: dict[str, torch.Tensor] = {}
        names = [reference.name for reference in references(value)]
        if names or receiver.is_value:
            old = receiver.template()
            value = shaped_like(old, value)
            for keys, leaf in leaves(old, keys_of_pointer(where)) if names else ():
                if isinstance(leaf, torch.Tensor):
                    current[stored_name(keys)[1]] = leaf
        self._taken[where] = value, receiver
        for name in names:  # create the tensors, except an object's current shards and tensors tied to others
            target, dtype, tensor = self._aliases.get(name, name), self._stored.dtypes.get(name), current.get(name)
            if vacancy is not None and target in self._tied:
                self._tensors[name] = in_memory(self._tied[target].detach(), dtype)
                continue
            if target not in self._places:
                where = f"{self._checkpoint.path / STATE}, {name}"
                raise CheckpointError("A value refers to a tensor that the checkpoint lacks", where=where)
            spec, is_new = self._places[target].spec, vacancy is not None or tensor is None or not is_sharded(tensor)
            if vacancy is not None:
                tensor = self._made_for(*vacancy, spec, dtype)
            elif tensor is None or is_new:
                device = torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device
                tensor = in_memory(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device), dtype)
            self._tensors[name] = tensor.detach()
            form = resolve(tensor, partial(str, name), vacancy and vacancy[0])
            if form is None:
                continue
            self._copies += [] if form.copy_back is None else [form.copy_back]
            if vacancy is not None:
                self._tied[target] = form.tensor
            # Other ranks' copies are not compared.
            self._new += [replace(part, replicas=(), is_new=is_new) for part in form.parts(spec.kind, target)]

    def _made_for(self, parameter: nn.Parameter, on_host: bool, spec: TensorSpec, dtype: str | None) -> torch.Tensor:
        """Return memory for a parameter's optimizer state, placed as optimizers place it.

        Args:
            on_host: Whether the state is a step counter on the host.
            spec: The state's spec in the files.
            dtype: The state's dtype in memory. None for its dtype in the files.
        """
        kind = torch_dtype(spec.dtype) if dtype is None else getattr(torch, dtype)
        shape = spec.shape[:-1] if dtype is not None and kind.is_complex else spec.shape
        order, dims = self._stored.orders.get(spec.name, ()), range(len(shape))
        is_ordered = 0 < len(order) == len(spec.shape) and not is_sharded(parameter)
        if not is_ordered and not on_host and shape == tuple(getattr(parameter, "global_shape", parameter.shape)):
            return torch.zeros_like(parameter.detach(), dtype=kind)
        outermost_first = order[: len(shape)] if is_ordered else dims  # in the files, complex numbers have a dimension
        device = torch.device("cpu") if on_host else local_of(parameter).device
        memory = torch.zeros([shape[dim] for dim in outermost_first], dtype=kind, device=device)
        return memory.permute([outermost_first.index(dim) for dim in dims])


def _without_tensors(value: Any) -> Any:
    """Return a value without the tensors stored by leaf in it, and without dicts left empty."""
    if type(value) is not ByLeaf:
        return value
    members = ((key, _without_tensors(member)) for key, member in value.items() if not _is_implied(member))
    return ByLeaf({key: member for key, member in members if type(member) is not ByLeaf or member})


def _is_implied(value: object) -> bool:
    return isinstance(value, TensorReference) and value.is_implied


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
