"""Fills a nested state dict from a checkpoint: finds each of its leaves there, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprise.errors import MismatchError
from reprise.loading.loader import check_tensors
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.documents import StoredState, read_state
from reprise.nested.loaded import LoadedState, Strictness, is_refused, log_names
from reprise.nested.own_state import is_random_state
from reprise.nested.stored_names import MODEL, OPTIMIZER, PER_RANK, Keys, keys_of, keys_of_pointer, pointer
from reprise.nested.table import JointTable
from reprise.nested.taken import Taken
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf, TensorReference, references
from reprise.nested.untaken import log_options, log_untaken
from reprise.tensors.live import LiveTensor
from reprise.tensors.modes import own_modes


@dataclass(slots=True)
class Filling:
    """A load into a nested state dict, on a single rank.

    Args:
        tensors: this rank's, with the ranks of the same boxes.
        joint: the table of all ranks.
        taken: what the tree takes from the checkpoint at hand.
        missing, unexpected: the names that one side alone has, and that the load does not refuse.
    """

    tree: Tree
    tensors: Sequence[LiveTensor]
    joint: JointTable
    strict: Strictness
    taken: Taken = field(init=False)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @own_modes()
    def live(self, checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in a checkpoint.

        Raises:
            MismatchError: listing what does not fit.
        """
        joint, stored, places = self.joint, read_state(checkpoint), read_places(checkpoint)
        source = self.taken = Taken(checkpoint, stored, self.tree)
        missing = [*source.take_optimizers(self.strict), *source.take_values(joint.values), *source.take_states()]
        if self.tree.takes_rest:
            source.take_rest({MODEL, OPTIMIZER[0], PER_RANK, *joint.entries})
        other_names = source.other_names(joint.aliases)
        tensors = [*source.own_tensors(self.tensors, other_names), *source.new]
        lacking = {tensor.spec.name: tensor.spec for tensor in tensors if source.target(tensor.spec.name) not in places}
        pointers = joint.values | source.values.keys()
        values = [value for where in pointers if type(value := stored.at(keys_of_pointer(where))) is not ByLeaf]
        names = [reference.name for value in values for reference in references(value)]
        names += [tensor.spec.name for tensor in tensors]
        names += [other_names.get(spec.name, spec.name) for spec in joint.specs]
        requested = set(map(source.target, names))
        unexpected = {name: keys_of(place.spec.kind, name) for name, place in places.items() if name not in requested}
        unexpected |= {pointer(keys): keys for keys in sorted(_untaken(stored, pointers), key=pointer)}
        unexpected = {name: keys for name, keys in unexpected.items() if self._is_asked(keys)}
        problems = [f"{name} is missing" for name in missing if self._is_refused(keys_of_pointer(name))]
        if self.strict != "missing":
            problems += [f"{name} is unexpected" for name, keys in unexpected.items() if self._is_refused(keys)]
        present = [
            replace(tensor, spec=replace(tensor.spec, name=source.target(tensor.spec.name)))
            for tensor in tensors
            if (spec := lacking.get(tensor.spec.name)) is None or self._is_refused(keys_of(spec.kind, spec.name))
        ]
        specs = [tensor.spec for tensor in present]
        check_tensors(specs, places, where=checkpoint.path, is_partial=True, further=problems)
        self.missing, self.unexpected = [*lacking, *missing], list(unexpected)
        return present

    def _is_asked(self, keys: Keys) -> bool:
        """Return whether the load is about a name of the checkpoint."""
        return keys[0] in self.joint.entries and not ("rng" in self.tree.declined and is_random_state(keys))

    def _is_refused(self, keys: Keys) -> bool:
        """Return whether the load refuses a name that one side alone has."""
        modules = (at for at, member in self.tree.objects.items() if isinstance(member, torch.nn.Module))
        return is_refused(self.strict, keys, [(MODEL,), *modules])

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. A second call does the same again.

        Raises:
            MismatchError: if an object does not take its state.
        """
        with own_modes():  # the versions of all tensors rise, of DTensors and ties too
            torch.autograd.graph.increment_version([stored.tensor for stored in self.tree.tensors.values()])
            self.tree.put_tensors(self.missing)
            self.taken.put()
        self.taken.give()  # in the modes of the caller, whose code it is
        unknown = [name for entries in self.tree.modules.values() for name in entries.give()]
        if unknown and self.strict in (True, "model"):
            raise MismatchError(
                "A module does not know entries of the checkpoint's state dict",
                found=", ".join(unknown),
                fix='Make it as it was made when the checkpoint was saved, or give strict="missing".',
            )
        self.unexpected = list(dict.fromkeys((*self.unexpected, *unknown)))

    def result(self, checkpoint: Checkpoint, *, is_first: bool) -> LoadedState:
        """Log the names missing on a side, and return the result of the load.

        Args:
            is_first: whether this rank logs the lines common to all ranks.
        """
        values = self.taken.rest()
        result = LoadedState({**values, "iteration": checkpoint.iteration}, self.missing, self.unexpected)
        log_names(checkpoint.path, result, is_first=is_first)
        if is_first:
            log_untaken(checkpoint, self.taken.stored, self.tree, self.joint.entries, values)
            log_options(checkpoint, self.tree, self.taken.numbers)
        return result


def _untaken(stored: StoredState, pointers: Collection[str]) -> Iterator[Keys]:
    """Yield the keys of the values in a checkpoint that are not below these pointers.

    A value with tensors, or with requested members, is divided: a template finds a tensor in a list by its name, and a
    number beside it as a value of its own.
    """
    parents = {pointer(keys[:count]) for keys in map(keys_of_pointer, pointers) for count in range(len(keys))}

    def untaken(value: object, keys: Keys) -> Iterator[Keys]:
        where = pointer(keys)
        if where in pointers or isinstance(value, TensorReference):
            return
        if isinstance(value, (list, tuple)) and (where in parents or any(references(value))):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, member in value.items():
                yield from untaken(member, (*keys, str(key)))
        else:
            yield keys

    return untaken(stored.root, ())
