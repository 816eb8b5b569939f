"""Fills a nested state dict from a checkpoint: finds each of its leaves there, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from reprise.errors import MismatchError
from reprise.format.layout import Place, TensorKind, TensorSpec
from reprise.json_file import Json
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.documents import NestedValues, by_leaf, read_values
from reprise.nested.loaded import LoadedState, Matched, Strictness, match
from reprise.nested.own_state import is_random_state
from reprise.nested.stateful import Receiver, put_back, references, shaped_like, take_out
from reprise.nested.stored_names import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    Keys,
    keys_of,
    keys_of_pointer,
    pointer,
    stored_name,
)
from reprise.nested.table import JointTable
from reprise.nested.tree import OptimizerState, ParameterGroup, Tree
from reprise.nested.typed_values import TensorReference, decode_number, encode
from reprise.nested.untaken import log_options, log_untaken
from reprise.optimizer_state import zeros_for
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.file_form import in_memory, resolve
from reprise.tensors.live import Grid, LiveTensor, is_dtensor, locate
from reprise.tensors.modes import own_modes


@dataclass(slots=True)
class Filling:
    """A load into a nested state dict, on a single rank.

    Args:
        tensors: this rank's, with the ranks of the same boxes.
        joint: the table of all ranks.
        saved: the values of the checkpoint at hand.
        values: the same by the pointers of the load.
        made: by JSON Pointer, the tensors of optimizers allocated for the checkpoint at hand, and what puts them there.
        receivers: those of the tree, and of what its objects lack and the checkpoint at hand has.
        numbers: by the pointer of a parameter group, its numbers in the checkpoint.
        whole: by pointer, the values with tensors, with references to those in `allocated`, and the new content of
            empty dicts.
        allocated: by stored name, the tensors of such values.
        copies: the calls that copy those which stand for live ones back to them.
        shared: by stored name, the tensors with which new state of an optimizer may be tied.
        unknown: the entries of the checkpoint at hand that no module takes.
    """

    tree: Tree
    tensors: Sequence[LiveTensor]
    joint: JointTable
    strict: Strictness
    matched: Matched = field(default_factory=lambda: Matched([]))
    saved: NestedValues = field(default_factory=NestedValues)
    values: NestedValues = field(default_factory=NestedValues)
    made: dict[str, tuple[Callable[[torch.Tensor], None], torch.Tensor]] = field(default_factory=dict)
    receivers: dict[str, Receiver] = field(default_factory=dict)
    numbers: dict[str, Json] = field(default_factory=dict)
    whole: dict[str, object] = field(default_factory=dict)
    allocated: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[Callable[[], None]] = field(default_factory=list)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @own_modes()
    def live(self, checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in a checkpoint.

        Raises:
            MismatchError: listing what does not fit.
        """
        self.saved, joint = read_values(checkpoint), self.joint
        values = self.saved
        self.receivers, self.shared = self.tree.receivers | self._further_receivers(checkpoint, values), {}
        pointers = joint.values | self.receivers.keys()
        if self.tree.optimizers:
            self.shared = {stored_name(keys)[1]: tensor for keys, tensor in self.tree.tensors.items()}
        own_names = frozenset(self.shared)

        def is_asked(keys: Keys) -> bool:
            return keys[0] in joint.entries and not ("rng" in self.tree.declined and is_random_state(keys))

        allocated = list(self._allocate(checkpoint, values))
        names = {at.name for where in pointers if where in values.values for at in references(values.value(where))}
        nested_names = {checkpoint.manifest.aliases.get(name, name) for name in names}
        self.values = values = by_leaf(values, pointers)
        self._fill_empty(values)
        allocated += list(self._make_tensors(checkpoint, values, own_names))
        requested = {
            where
            for where, value in values.values.items()
            if is_asked(keys_of_pointer(where)) and value != {} and not _is_below(where, pointers)
        }
        missing = [where for where, value in self.tree.values.items() if where not in values.values and value != {}]
        missing += [where for where in self.receivers if where not in self.whole]
        self.numbers = {}
        missing += list(self._find_numbers(values))
        other_names = self._other_names(checkpoint)
        meta_names = {stored_name(keys)[1] for keys in self.tree.meta}
        values_of_tensors = {stored_name(keys_of_pointer(where))[1] for where, at in self.receivers.items() if at.new}
        tensors = [
            replace(
                tensor,
                spec=replace(tensor.spec, name=other_names.get(tensor.spec.name, tensor.spec.name)),
                is_new=tensor.spec.name in meta_names,
            )
            for tensor in self.tensors
            if tensor.spec.name not in values_of_tensors
        ]
        _require_dtypes(checkpoint, self.tree.dtypes, values.dtypes, [tensor.spec.name for tensor in tensors])
        self.matched = match(
            checkpoint,
            [*tensors, *allocated],
            strict=self.strict,
            models=[
                (MODEL,),
                *(keys for keys, value in self.tree.objects.items() if isinstance(value, torch.nn.Module)),
            ],
            is_asked=lambda spec: is_asked(keys_of(spec.kind, spec.name)) and spec.name not in nested_names,
            requested_names=[other_names.get(spec.name, spec.name) for spec in joint.specs],
            missing=missing,
            unexpected=sorted(requested - pointers),
        )
        return self.matched.live

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. A second call does the same again.

        Raises:
            MismatchError: if an object does not take its state.
        """
        with own_modes():
            self._replace()
        for where, receiver in self.receivers.items():  # in the modes of the caller, whose code it is
            if where in self.whole:
                receiver.give(where, put_back(self.whole[where], self.allocated))
        self.unknown = [name for entries in self.tree.modules.values() for name in entries.give()]
        if self.unknown and self.strict in (True, "model"):
            raise MismatchError(
                "A module does not know entries of the checkpoint's state dict",
                found=", ".join(self.unknown),
                fix='Make it as it was made when the checkpoint was saved, or give strict="missing".',
            )

    def result(self, checkpoint: Checkpoint, *, is_first: bool) -> LoadedState:
        """Log the names missing on a side, and return the result of the load.

        Args:
            is_first: whether this rank logs the lines common to all ranks.
        """
        matched = replace(self.matched, unexpected=[*self.matched.unexpected, *self.unknown])
        matched.log(checkpoint, is_first=is_first)
        further_values = put_back(self._remaining_values(self.saved).nested(), self.allocated)
        if is_first:
            log_untaken(checkpoint, self.saved, self.tree, self.joint.entries, further_values)
            log_options(checkpoint, self.tree, self.numbers)
        return LoadedState({**further_values, "iteration": checkpoint.iteration}, matched.missing, matched.unexpected)

    def _replace(self) -> None:
        """Put new tensors and values in their places; the versions of all tensors rise, of DTensors and ties too."""
        torch.autograd.graph.increment_version(list(self.tree.tensors.values()))
        values = self.values
        self.tree.put_tensors(self.matched.missing)
        for where in self.tree.values:
            if where in self.whole:
                self.tree.replace_value(where, put_back(self.whole[where], self.allocated))
            elif where in values.values:
                self.tree.replace_value(where, values.value(where))
        for put, tensor in self.made.values():
            put(tensor)
        for where, optimizer in self.tree.optimizers.items():
            for number, group in enumerate(optimizer.groups):
                for key, value in self.numbers.get(_group(where, number), {}).items():
                    if not isinstance(group.given.get(key), torch.Tensor):
                        is_list = isinstance(value, list) and isinstance(group.given.get(key), list)
                        group.given[key] = list(value) if is_list else decode_number(value)
        for call in (*self.tree.after_load, *self.copies):
            call()

    def _remaining_values(self, values: NestedValues) -> NestedValues:
        """Return the values of `state` under the outermost keys absent from the call."""
        left_out = {MODEL, OPTIMIZER[0], PER_RANK, *self.joint.entries}
        remaining = {
            where: value
            for where, value in values.values.items()
            if self.tree.takes_rest
            and keys_of_pointer(where)[0] not in left_out
            and not any(reference.is_sharded for reference in references(values.value(where)))
        }
        return replace(values, values=remaining)

    def _allocate(self, checkpoint: Checkpoint, values: NestedValues) -> Iterator[LiveTensor]:
        """Make the tensors of the values with tensors, and yield them."""
        self.whole, self.allocated, self.copies = {}, {}, []
        places, aliases = read_places(checkpoint), checkpoint.manifest.aliases
        states = self._with_tensors(values, places.values())
        for where in (*self.receivers, *self.tree.values, *self._remaining_values(values).values):
            receiver = self.receivers.get(where)
            value = states.below(where) if receiver or where in values.values else None
            names = [reference.name for reference in references(value)]
            tensors: dict[Keys, torch.Tensor] = {}
            if names and receiver:
                template = receiver.template()
                take_out(template, keys_of_pointer(where), tensors)
                value = value if where in values.values else shaped_like(template, value)
            if names or (receiver and states.has(where)):
                self.whole[where] = value
            by_name = {stored_name(keys)[1]: tensor for keys, tensor in tensors.items()}
            new = receiver.new if receiver else None
            for name in names:
                target, dtype = aliases.get(name, name), values.dtypes.get(name)
                if new is not None and target in self.shared:
                    self.allocated[name] = in_memory(self.shared[target].detach(), dtype)
                    continue
                spec = places[target].spec
                stored, tensor, is_new = self._tensor_for(spec, dtype, by_name.get(name), new)
                self.allocated[name] = tensor
                if new is not None:
                    self.shared[target] = stored
                yield from _unreplicated(replace(spec, name=name), stored, is_new=is_new)

    def _with_tensors(self, values: NestedValues, places: Iterable[Place]) -> NestedValues:
        """Return the values with references to the tensors of objects whose state was stored by leaf, as a dict."""
        divided = self.receivers.keys() - values.values.keys()
        tensors: Json = {}
        for keys, name in ((keys_of(p.spec.kind, p.spec.name), p.spec.name) for p in places if divided):
            if any(pointer(keys[:count]) in divided for count in range(1, len(keys) + 1)):
                tensors[pointer(keys)] = encode(TensorReference(name), keys)
        return replace(values, values={**values.values, **tensors})

    def _fill_empty(self, values: NestedValues) -> None:
        """Let an empty dict take its values from the checkpoint, except those requested by a rank."""
        free = {where: value for where, value in values.values.items() if where not in self.joint.values}
        for where, value in self.tree.values.items():
            below = replace(values, values=free).below(where) if value == {} else None
            if below is not None:
                self.whole[where] = below

    def _tensor_for(
        self,
        spec: TensorSpec,
        dtype: str | None,
        template: torch.Tensor | None,
        new: Callable[[TensorSpec, str | None], torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return the tensor to fill, the same in memory, and whether it is new: otherwise it is an object's DTensor."""
        is_new = template is None and new is not None
        if template is None and new is not None:
            template = new(spec, dtype)
        if (
            template is not None
            and (is_new or is_dtensor(template))
            and (form := resolve(template, partial(str, spec.name))) is not None
        ):
            self.copies += [] if form.copy_back is None else [form.copy_back]
            return form.tensor, template.detach(), is_new
        device = torch.device("cpu") if template is None or template.is_meta else template.device
        stored = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        return stored, in_memory(stored, dtype), True

    def _other_names(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return a stored name for each tied tensor whose first name is missing in the checkpoint."""
        stored = {*read_places(checkpoint), *checkpoint.manifest.aliases}
        aliases = self.joint.aliases.items()
        return {name: alias for alias, name in aliases if name not in stored and alias in stored}

    def _find_numbers(self, values: NestedValues) -> Iterator[str]:
        """Find the numbers of each parameter group, and yield the groups and the numbers missing in the checkpoint.

        Raises:
            MismatchError: for a group whose parameters were in groups of different numbers, and for a group of tensors
                from another place.
        """
        for where, optimizer in self.tree.optimizers.items():
            saved = _SavedGroups(values.groups.get(where, ()))
            new_places = {pointer(keys_of_pointer(at)[:-1]) for at in self.made}
            for number, group in enumerate(optimizer.groups):
                at = _group(where, number)
                if self.strict in (True, "missing"):
                    saved.require_one(at, group)
                numbers = saved.numbers(group, number)
                if numbers is None:
                    yield at
                    continue
                if any(isinstance(v, torch.Tensor) for v in group.given.values()) or at in new_places:
                    saved.require_place(at, group, number)
                self.numbers[at] = numbers
                lacking = group.numbers.keys() - numbers.keys() - group.defaults
                yield from (at + pointer((key,)) for key in group.numbers if key in lacking)

    def _further_receivers(self, checkpoint: Checkpoint, values: NestedValues) -> dict[str, Receiver]:
        """Return receivers of an optimizer's values, and of what a module lacks before its first use."""
        receivers: dict[str, Receiver] = {}
        for where in values.values.keys() - self.tree.receivers.keys() if self.tree.modules else ():
            *parents, name = keys_of_pointer(where)
            parts = ((tuple(parents), name[:end]) for end in range(len(name)) if not end or name[end - 1] == ".")
            for entries in (self.tree.modules[part] for part in parts if part in self.tree.modules):
                receivers[where] = Receiver(entries.blank, partial(entries.put, name))
        for where, optimizer in self.tree.optimizers.items():
            top, new = (*keys_of_pointer(where), "state"), _maker(checkpoint, optimizer, values)
            tensors = (keys_of(place.spec.kind, place.spec.name) for place in read_places(checkpoint).values())
            leaves = [(keys_of_pointer(at), 2) for at in values.values] + [(keys, 3) for keys in tensors]
            for keys, depth in leaves:
                at = keys[len(top) :]
                if keys[: len(top)] == top and len(at) >= depth and at[0] in optimizer.parameters:
                    make = partial(new, optimizer.parameters[at[0]], on_host=False)
                    receivers[pointer((*top, *at[:2]))] = Receiver(list, partial(optimizer.put, *at[:2]), make)
        return receivers

    def _make_tensors(
        self, checkpoint: Checkpoint, values: NestedValues, own_names: Collection[str]
    ) -> Iterator[LiveTensor]:
        """Make the missing tensors of an optimizer, as before its first step; tied ones stay tied.

        Args:
            own_names: the stored names of the tree.
        """
        self.made = {}
        places, aliases = read_places(checkpoint), checkpoint.manifest.aliases
        names = {**{name: name for name in places}, **aliases}
        for where, optimizer in self.tree.optimizers.items():
            new = _maker(checkpoint, optimizer, values)
            on_device = any(g.given.get("fused") or g.given.get("capturable") for g in optimizer.groups)
            for stored, target in names.items():
                spec, dtype = places[target].spec, values.dtypes.get(target)
                kind = spec.kind if stored == target else TensorKind.OPTIMIZER
                keys = keys_of(kind, stored)
                target_place = None if stored in own_names else optimizer.place(where, keys)
                if target_place is None:
                    continue
                parameter, put = target_place
                if target in self.shared:
                    tensor = in_memory(self.shared[target].detach(), dtype)
                else:
                    tensor = new(parameter, spec, dtype, on_host=keys[-1] == "step" and not on_device)
                    resolved = resolve(tensor, partial(str, stored))
                    assert resolved is not None
                    self.shared[target] = resolved.tensor
                    yield from _unreplicated(replace(spec, name=stored), resolved.tensor)
                self.made[pointer(keys)] = put, tensor


def _maker(checkpoint: Checkpoint, optimizer: OptimizerState, values: NestedValues) -> Callable[..., torch.Tensor]:
    elements = sum(parameter.numel() for parameter in optimizer.parameters.values())
    return partial(zeros_for, orders=values.orders, elements=elements, where=checkpoint.path)


def _require_dtypes(
    checkpoint: Checkpoint, dtypes: Mapping[str, str], saved: Mapping[str, str], names: Sequence[str]
) -> None:
    """Refuse tensors of the same form in files but with different dtypes in memory.

    Args:
        names: of the tensors to fill.
    """
    places, aliases = read_places(checkpoint), checkpoint.manifest.aliases
    stored = [(name, aliases.get(name, name)) for name in names]
    for name, at in stored:
        if at in places and dtypes.get(name) != saved.get(at):
            dtype = str(places[at].spec.dtype)
            raise MismatchError(
                "A tensor has another dtype in the checkpoint",
                where=f"{checkpoint.path}, {name}",
                expected=dtypes.get(name, dtype),
                found=saved.get(at, dtype),
            )


def _group(where: str, number: int) -> str:
    return f"{where}/param_groups/{number}"


class _SavedGroups:
    """The parameter groups of an optimizer in a checkpoint."""

    def __init__(self, groups: Sequence[Json]) -> None:
        self._groups = groups
        self._by_name = {name: place for place, group in enumerate(groups) for name in group["names"]}

    def numbers(self, group: ParameterGroup, number: int) -> Json | None:
        """Return the numbers of a group; None if the checkpoint lacks a parameter, or had them in different groups.

        A group without parameters has the numbers of such a group at its place, if any.
        """
        if not group.names:
            is_empty = number < len(self._groups) and not self._groups[number]["names"]
            return self._groups[number]["numbers"] if is_empty else dict(group.numbers)
        candidates = [self._groups[self._by_name[name]]["numbers"] for name in group.names if name in self._by_name]
        is_one = len(candidates) == len(group.names) and all(numbers == candidates[0] for numbers in candidates)
        return candidates[0] if is_one else None

    def require_one(self, where: str, group: ParameterGroup) -> None:
        """Refuse a group whose parameters were in groups of different numbers."""
        known_names = [name for name in group.names if name in self._by_name]
        for name in known_names[1:]:
            first, numbers = (self._groups[self._by_name[each]]["numbers"] for each in (known_names[0], name))
            if first != numbers:
                raise MismatchError(
                    "The parameters of a group were in groups of different numbers",
                    where=where,
                    expected=f"those of {known_names[0]}, {first}",
                    found=f"{name} with {numbers}",
                    fix="Divide the parameters into groups as when the checkpoint was saved.",
                )

    def require_place(self, where: str, group: ParameterGroup, number: int) -> None:
        """Refuse a group with tensors from another place: tensors are stored by place."""
        places = {self._groups[self._by_name[name]].get("place", self._by_name[name]) for name in group.names}
        if places - {number}:
            raise MismatchError(
                "A parameter group with tensors was at another place",
                where=where,
                expected=f"place {number} in the list of groups",
                found=", ".join(map(str, sorted(places))),
                fix="Give the groups in the order in which the checkpoint was saved.",
            )


def _is_below(where: str, pointers: Collection[str]) -> bool:
    keys = keys_of_pointer(where)
    return any(pointer(keys[:count]) in pointers for count in range(1, len(keys)))


def _unreplicated(spec: TensorSpec, tensor: torch.Tensor, *, is_new: bool = True) -> Iterator[LiveTensor]:
    """Yield a tensor allocated for this load; other ranks' copies are not compared."""
    for tensor_of_rank in locate(spec.kind, spec.name, tensor, grid=Grid.flat(1)):
        yield replace(tensor_of_rank, replicas=(), is_new=is_new)
