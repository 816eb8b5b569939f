"""Fills a nested state dict from a checkpoint: finds what receives each leaf, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.layout import TensorSpec
from reprise.format.names import STATE
from reprise.loading.reader import Checkpoint, check_tensors, read_places
from reprise.nested.documents import StoredState
from reprise.nested.loaded import LoadedState, Strictness, log_result
from reprise.nested.modules import Receiver, hand_over
from reprise.nested.stored_names import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    RNG,
    Keys,
    keys_of_pointer,
    pointer,
    stored_name,
)
from reprise.nested.tree import Tree
from reprise.nested.typed_values import TensorReference, leaves, needs_template, rebuilt, references
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import LiveTensor, is_sharded, local_of
from reprise.tensors.modes import own_modes


class Filling:
    """Loads a checkpoint into a nested state dict, on a single rank.

    Args:
        tree: This rank's tree to fill.
        tensors: This rank's tensors.
        aliases: Second names on any rank, alias -> name in its tensors.
        names: JSON Pointers to all tensors requested by any rank, and to all else.
        entries: The outermost keys passed by any rank.
        stored: The checkpoint's state.
    """

    def __init__(
        self,
        tree: Tree,
        tensors: Mapping[str, LiveTensor],
        aliases: Mapping[str, str],
        names: Sequence[Iterable[str]],
        entries: Collection[str],
        strict: Strictness,
        checkpoint: Checkpoint,
        stored: StoredState,
    ) -> None:
        self._tree, self._own, self._entries, self._strict = tree, tensors, entries, strict
        self._checkpoint, self._stored, self._places = checkpoint, stored, read_places(checkpoint)
        saved_aliases = checkpoint.manifest.aliases
        file_names = {*self._places, *saved_aliases}
        # By second names, the names in the files: here, tied tensors may have others.
        self._targets = {
            name: saved_aliases.get(alias, alias)
            for alias, name in aliases.items()
            if alias in file_names and name not in file_names
        } | {**saved_aliases}
        tensor_names, value_names = names
        self._value_names = frozenset(value_names)
        # The requested tensors, by their names in the files. A value in the place of one is not requested.
        requested = {self._target(stored_name(keys_of_pointer(name))[1]) for name in tensor_names}
        self._requested = requested & self._places.keys()
        # The names that one side alone has, as keys, in the order in which they are listed.
        self._missing, self._unexpected = dict[str, None](), dict[str, None]()
        # By keys, the new values with tensor references, their templates, and their receivers.
        self._taken = dict[Keys, tuple[Any, Any, Receiver]]()
        self._tensors = dict[str, torch.Tensor]()  # the tensors in the values, by stored name
        self._new = list[LiveTensor]()  # their parts to fill
        self._copies = [stored.copy_back for stored in tree.tensors.values()]
        self._returned = dict[str, Any]()
        # By stored name, the tensors to which new optimizer state may be tied.
        self._tied = {stored_name(keys)[1]: each.tensor for keys, each in tree.tensors.items()}
        self._live_names = frozenset(self._tied)

    @own_modes()
    def live(self) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in the checkpoint.

        Raises:
            MismatchError: Lists the mismatched names and tensors.
        """
        places = self._places
        receivers = self._tree.receivers.items()
        values = [keys for keys, receiver in receivers if keys[0] in self._entries and not receiver.is_open]
        self._missing = dict.fromkeys(map(pointer, (*self._take_groups(), *values)))
        requested = {MODEL, OPTIMIZER[0], PER_RANK, *self._entries}
        for key, value in self._stored.root.items():
            if self._tree.returns and key not in requested and not needs_template(value):
                self._take((key,), value, Receiver(dict, partial(self._returned.__setitem__, key)))
            elif key != PER_RANK or key in self._entries:  # a load may skip random state
                self._visit((key,), value, is_requested=False)
        replaced = {stored_name(keys)[1] for keys in self._taken}
        pairs = [(self._target(name), each) for name, each in self._own.items() if name not in replaced]
        self._missing = dict.fromkeys(name for name, _ in pairs if name not in places) | self._missing
        tensors = [replace(each, spec=replace(each.spec, name=name)) for name, each in pairs if name in places]
        saved_dtypes = self._stored.dtypes
        dtypes = {self._target(name): dtype for name, dtype in self._tree.dtypes().items()}
        problems = [
            f"{name} has dtype {saved_dtypes.get(name, places[name].spec.dtype)}, "
            f"the model has {dtypes.get(name, each.spec.dtype)}"
            for name, each in pairs
            if name in places and dtypes.get(name) != saved_dtypes.get(name)
        ]
        tensors += self._new
        self._unexpected = dict.fromkeys(name for name in self._unexpected if name not in self._requested)
        problems += [f"{name} is missing" for name in self._missing if self._strict]
        problems += [f"{name} is unexpected" for name in self._unexpected if self._strict is True]
        specs = [tensor.spec for tensor in tensors]
        check_tensors(specs, places, where=self._checkpoint.path, is_partial=True, further=problems)
        return [replace(tensor, replicas=()) for tensor in tensors]  # a rank verifies all that it reads

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. Calling it twice has the same effect.

        Raises:
            MismatchError: An object refuses its state.
        """
        tree = self._tree
        with own_modes():  # increases all version counters, for DTensors and tied tensors too
            torch.autograd.graph.increment_version([stored.tensor for stored in tree.tensors.values()])
            for copy in filter(None, self._copies):
                copy()
        for keys, (value, template, receiver) in self._taken.items():  # outside `own_modes`: this is the caller's code
            state = rebuilt(
                value, lambda leaf: self._tensors[leaf.name] if isinstance(leaf, TensorReference) else leaf, template
            )
            hand_over(pointer(keys), receiver.put, state)

    def result(self, *, is_first: bool) -> LoadedState:
        """Log the names missing on a side, and return the load's result.

        Args:
            is_first: Whether this rank logs the lines common to all ranks.
        """
        checkpoint = self._checkpoint
        values = {**self._tree.given, **self._returned, "iteration": checkpoint.iteration}
        result = LoadedState(values, self._missing, self._unexpected)
        log_result(checkpoint.path, result, self._stored, self._tree, self._entries, is_first=is_first)
        return result

    def _target(self, name: str) -> str:
        """Return the name under which the checkpoint stores a rank's tensor. A tied tensor's may be another."""
        return self._targets.get(name, name)

    def _take_groups(self) -> Iterator[Keys]:
        """Take the parameter groups' hyperparameters. Yield what the checkpoint lacks.

        It lacks a group with a new parameter, or with parameters whose hyperparameters differed.

        Raises:
            MismatchError: A group with tensors, which are stored by place, had another place.
        """
        for top, optimizer in self._tree.optimizers.items():
            saved = {
                name: (group["numbers"], group.get("place", place))
                for place, group in enumerate(self._stored.groups.get(pointer(top), ()))
                for name in group["names"]
            }
            for number, group in enumerate(optimizer.groups):
                keys = (*top, "param_groups", str(number))
                sources = [saved[name] for name in group.names if name in saved]
                if len(sources) < len(group.names) or any(numbers != sources[0][0] for numbers, _ in sources):
                    yield keys
                elif (places := {place for _, place in sources} - {number}) and self._stored.members(*keys):
                    raise MismatchError(
                        "A parameter group with tensors had another place in the checkpoint",
                        where=pointer(keys),
                        expected=f"place {number} in the list of groups",
                        found=", ".join(map(str, sorted(places))),
                        fix="Pass the groups in their saved order.",
                    )
                elif sources:
                    numbers, _ = sources[0]
                    self._take(keys, numbers, Receiver(dict, group.replace))
                    yield from ((*keys, key) for key in group.numbers if key not in {*numbers, *group.defaults})

    def _visit(self, keys: Keys, value: Any, *, is_requested: bool) -> None:
        """Take a stored value if the tree has a receiver for it, and otherwise visit its members.

        Args:
            is_requested: Whether some rank requests a value around it.
        """
        if isinstance(value, TensorReference) and value.name in self._live_names:
            self._unexpected[self._target(value.name)] = None  # unless a rank requests it: ties are one request
            return
        where, receiver = pointer(keys), self._tree.receiver(keys)
        is_declined = RNG in self._tree.declined and keys[::2] == (PER_RANK, RNG)  # between them is the rank
        is_requested = is_requested or is_declined or (receiver is None and where in self._value_names)
        if receiver is not None and not (receiver.is_value and needs_template(value)):
            self._missing.pop(where, None)
            self._take(keys, value, receiver)
        elif isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(references(value))):
            for key, member in value.items() if isinstance(value, dict) else enumerate(value):
                self._visit((*keys, str(key)), member, is_requested=is_requested)
        elif not is_requested and keys[0] in self._entries:
            self._unexpected[self._target(value.name) if isinstance(value, TensorReference) else where] = None

    def _take(self, keys: Keys, value: Any, receiver: Receiver) -> None:
        """Take a value and create its tensors. Sharded tensors in the current value are filled in place."""
        names = [reference.name for reference in references(value)]
        template = receiver.template() if names else None
        rows = leaves(template, keys)
        current = {stored_name(inner)[1]: leaf for inner, leaf in rows if isinstance(leaf, torch.Tensor)}
        self._taken[keys] = value, template, receiver
        for name in names:
            self._tensors[name] = self._tensor(name, current.get(name), receiver)

    def _tensor(self, name: str, current: torch.Tensor | None, receiver: Receiver) -> torch.Tensor:
        """Return a value's tensor to fill: an object's current shards, a tensor tied to another, or a new one.

        Raises:
            CheckpointError: The checkpoint lacks the tensor.
        """
        target, dtype, owner = self._target(name), self._stored.dtypes.get(name), receiver.owner
        self._requested.add(target)
        if owner is not None and target in self._tied:
            return in_memory(self._tied[target].detach(), dtype)
        if target not in self._places:
            where = f"{self._checkpoint.path / STATE}, {name}"
            raise CheckpointError("A value refers to a tensor that the checkpoint lacks", where=where)
        spec, is_new = self._places[target].spec, current is None or not is_sharded(current)
        tensor = self._new_tensor(spec, dtype, current, receiver) if current is None or is_new else current
        if (form := resolve(tensor, partial(str, name), owner)) is not None:
            self._copies.append(form.copy_back)
            if owner is not None:
                self._tied[target] = form.tensor
            self._new += [replace(part, is_new=is_new) for part in form.parts(spec.kind, target)]
        return tensor.detach()

    def _new_tensor(
        self, spec: TensorSpec, dtype: str | None, current: torch.Tensor | None, receiver: Receiver
    ) -> torch.Tensor:
        """Return memory for a tensor: optimizer state as optimizers place it, and others on the current one's device.

        Args:
            spec: The tensor's spec in the files.
            dtype: Its dtype in memory. None for its dtype in the files.
        """
        owner, kind = receiver.owner, torch_dtype(spec.dtype)
        like = current if owner is None else owner
        order = None if like is None or is_sharded(like) else self._stored.orders.get(spec.name)
        if owner is not None and not order and not owner.is_meta:
            form = in_memory(torch.empty(spec.shape, dtype=kind, device="meta"), dtype)
            if tuple(form.shape) == tuple(getattr(owner, "global_shape", owner.shape)):
                return torch.zeros_like(owner.detach(), dtype=form.dtype)
        device = torch.device("cpu") if like is None or like.is_meta else local_of(like).device
        return in_memory(
            torch.empty_permuted(spec.shape, order or [*range(len(spec.shape))], dtype=kind, device=device), dtype
        )
