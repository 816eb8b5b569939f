"""Fills a nested state dict from a checkpoint: finds what receives each leaf, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from reprise.nested.documents import read_state
from reprise.nested.loaded import LoadedState, Strictness, log_result
from reprise.nested.modules import Receiver, hand_over
from reprise.nested.stored_names import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    RNG,
    Keys,
    keys_of,
    pointer,
    stored_name,
)
from reprise.nested.table import JointTable
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf, TensorReference, leaves, rebuilt, references, without_tensors
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import LiveTensor, is_sharded, local_of
from reprise.tensors.modes import own_modes


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
        self._missing, self._unexpected = dict[str, Keys](), dict[str, Keys]()
        # By keys, the new values with tensor references, their templates, and their receivers.
        self._taken = dict[Keys, tuple[Any, Any, Receiver]]()
        self._requested = set[str]()  # the requested tensors, by their names in the files
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
        joint, places = self._joint, self._places
        values = [keys for keys, receiver in self._tree.receivers.items() if not receiver.is_open]
        self._missing = {pointer(keys): keys for keys in (*self._take_groups(), *values)}
        self._visit((), self._stored.root, is_requested=False)
        for key, value in without_tensors(self._stored.root).items() if self._tree.returns else ():
            if key not in {MODEL, OPTIMIZER[0], PER_RANK, *joint.entries}:
                self._take((key,), value, Receiver(dict, partial(self._returned.__setitem__, key)))
        tensors, lacking, problems = list[LiveTensor](), dict[str, Keys](), list[str]()
        dtypes, saved_dtypes = self._tree.dtypes(), self._stored.dtypes
        replaced = {stored_name(keys)[1] for keys in self._taken}
        for spec, tensor in ((each.spec, each) for each in self._own if each.spec.name not in replaced):
            name = self._target(spec.name)
            if name not in places:
                lacking[name] = keys_of(spec.kind, name)
                continue
            tensors.append(replace(tensor, spec=replace(spec, name=name)))
            if (dtype := dtypes.get(spec.name)) != (saved_dtype := saved_dtypes.get(name)):
                label = saved_dtype or places[name].spec.dtype
                problems.append(f"{name} has dtype {label}, the model has {dtype or spec.dtype}")
        tensors += self._new
        self._missing = lacking | self._missing
        self._requested |= {self._target(spec.name) for spec in joint.specs}
        left_out = {name: keys_of(place.spec.kind, name) for name, place in places.items()}
        left_out = {name: keys for name, keys in left_out.items() if name not in self._requested}
        left_out |= {where: self._unexpected[where] for where in sorted(self._unexpected)}
        self._unexpected = {name: keys for name, keys in left_out.items() if keys[0] in joint.entries}
        sides = [("missing", self._missing), ("unexpected", self._unexpected if self._strict != "missing" else {})]
        problems += [f"{n} is {side}" for side, names in sides for n, keys in names.items() if self._is_refused(keys)]
        specs, where = [tensor.spec for tensor in tensors], self._checkpoint.path
        check_tensors(specs, places, where=where, is_partial=True, further=problems)
        return tensors

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. Calling it twice has the same effect.

        Raises:
            MismatchError: An object refuses its state, or a module does not know an entry.
        """
        tree = self._tree
        with own_modes():  # increases all version counters, for DTensors and tied tensors too
            torch.autograd.graph.increment_version([stored.tensor for stored in tree.tensors.values()])
            for copy in self._copies:
                if copy is not None:
                    copy()
        for keys, (value, template, receiver) in self._taken.items():  # outside `own_modes`: this is the caller's code
            hand_over(pointer(keys), receiver.put, rebuilt(value, self._without_reference, template))
        unknown = [name for entries in tree.modules for name in entries.load()]
        if unknown and self._strict in (True, "model"):
            raise MismatchError(
                "A module does not know entries of the checkpoint's state dict",
                found=", ".join(unknown),
                fix='Build it as it was when the checkpoint was saved, or pass strict="missing".',
            )
        self._unexpected |= dict.fromkeys(unknown, ())

    def result(self, *, is_first: bool) -> LoadedState:
        """Log the names missing on a side, and return the load's result.

        Args:
            is_first: Whether this rank logs the lines common to all ranks.
        """
        checkpoint = self._checkpoint
        values = {**self._returned, "iteration": checkpoint.iteration}
        result = LoadedState(values, self._missing, self._unexpected)
        log_result(checkpoint.path, result, self._stored, self._tree, self._joint.entries, is_first=is_first)
        return result

    def _is_refused(self, keys: Keys) -> bool:
        """Return whether the load refuses a name missing on the other side."""
        modules = [at for at, member in self._tree.objects.items() if isinstance(member, nn.Module)]
        is_of_model = any(keys[: len(at)] == at for at in ((MODEL,), *modules))
        return self._strict is not False and (self._strict != "model" or is_of_model)

    def _target(self, name: str) -> str:
        """Return the name under which the checkpoint stores a rank's tensor. A tied tensor's may be another."""
        name = self._other_names.get(name, name)
        return self._aliases.get(name, name)

    def _take_groups(self) -> Iterator[Keys]:
        """Take the parameter groups' hyperparameters. Yield what the checkpoint lacks.

        It lacks a group with a new parameter, or with parameters whose hyperparameters differed.

        Raises:
            MismatchError: A group with tensors, which are stored by place, had another place.
        """
        for top, optimizer in self._tree.optimizers.items():
            saved = {
                name: {"place": place, **group}
                for place, group in enumerate(self._stored.groups.get(pointer(top), ()))
                for name in group["names"]
            }
            for number, group in enumerate(optimizer.groups):
                keys, sources = (*top, "param_groups", str(number)), [saved.get(name, {}) for name in group.names]
                numbers = [each.get("numbers", {}) for each in sources]
                places = {each.get("place", number) for each in sources}
                if {} in sources or any(each != numbers[0] for each in numbers):
                    yield keys
                elif places - {number} and self._stored.members(*keys):  # its tensors are there
                    raise MismatchError(
                        "A parameter group with tensors had another place in the checkpoint",
                        where=pointer(keys),
                        expected=f"place {number} in the list of groups",
                        found=", ".join(map(str, sorted(places))),
                        fix="Pass the groups in their saved order.",
                    )
                elif numbers:
                    self._take(keys, numbers[0], Receiver(dict, group.replace))
                    lacking = group.numbers.keys() - numbers[0].keys() - group.defaults
                    yield from ((*keys, key) for key in group.numbers if key in lacking)

    def _visit(self, keys: Keys, value: Any, *, is_requested: bool) -> None:
        """Take a stored value if the tree has a receiver for it, and otherwise visit its members.

        A value containing tensors is split: a template finds a tensor in a list by its name, and a number beside it as
        a separate value.

        Args:
            is_requested: Whether some rank requests a value around it.
        """
        if isinstance(value, TensorReference) and value.name in self._live_names:
            return
        where = pointer(keys)
        is_declined = RNG in self._tree.declined and keys[:1] == (PER_RANK,) and keys[2:3] == (RNG,)
        is_requested = is_requested or is_declined or where in self._joint.values
        receiver = self._tree.receiver(keys, value)
        part = without_tensors(value) if receiver is not None and receiver.is_value else value
        if receiver is not None and (not receiver.is_value or type(part) is not ByLeaf or receiver.is_open):
            self._missing.pop(where, None)
            self._take(keys, part, receiver)
        elif isinstance(value, TensorReference):
            self._requested |= {self._aliases.get(value.name, value.name)} if is_requested else set()
        elif isinstance(value, dict) or (isinstance(value, (list, tuple)) and any(references(value))):
            for key, member in value.items() if isinstance(value, dict) else enumerate(value):
                self._visit((*keys, str(key)), member, is_requested=is_requested)
        elif not is_requested:
            self._unexpected[where] = keys

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
        target, dtype, owner = self._aliases.get(name, name), self._stored.dtypes.get(name), receiver.owner
        self._requested.add(target)
        if owner is not None and target in self._tied:
            return in_memory(self._tied[target].detach(), dtype)
        if target not in self._places:
            where = f"{self._checkpoint.path / STATE}, {name}"
            raise CheckpointError("A value refers to a tensor that the checkpoint lacks", where=where)
        spec, tensor = self._places[target].spec, current
        is_new = tensor is None or not is_sharded(tensor)
        if tensor is None or is_new:
            tensor = self._new_tensor(spec, dtype, tensor, receiver)
        if (form := resolve(tensor, partial(str, name), owner)) is not None:
            self._copies.append(form.copy_back)
            if owner is not None:
                self._tied[target] = form.tensor
            # Other ranks' copies are not compared.
            self._new += [replace(part, replicas=(), is_new=is_new) for part in form.parts(spec.kind, target)]
        return tensor.detach()

    def _without_reference(self, leaf: object) -> object:
        return self._tensors[leaf.name] if isinstance(leaf, TensorReference) else leaf

    def _new_tensor(
        self, spec: TensorSpec, dtype: str | None, current: torch.Tensor | None, receiver: Receiver
    ) -> torch.Tensor:
        """Return memory for a tensor: optimizer state as optimizers place it, and others on the current one's device.

        Args:
            spec: The tensor's spec in the files.
            dtype: Its dtype in memory. None for its dtype in the files.
        """
        owner, kind, dims = receiver.owner, torch_dtype(spec.dtype), range(len(spec.shape))
        like, order = current if owner is None else owner, self._stored.orders.get(spec.name, ())
        if like is None or is_sharded(like) or len(order) != len(dims):
            order = ()
        on_host = receiver.on_host or like is None or like.is_meta
        if owner is not None and not order and not on_host:
            form = in_memory(torch.empty(spec.shape, dtype=kind, device="meta"), dtype)
            if tuple(form.shape) == tuple(getattr(owner, "global_shape", owner.shape)):
                return torch.zeros_like(owner.detach(), dtype=form.dtype)
        outermost_first, device = (
            order or dims,
            torch.device("cpu") if on_host or like is None else local_of(like).device,
        )
        memory = torch.empty([spec.shape[dim] for dim in outermost_first], dtype=kind, device=device)
        return in_memory(memory.permute([outermost_first.index(dim) for dim in dims]), dtype)
