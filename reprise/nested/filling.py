"""Fills a nested state dict from a checkpoint: finds each of its leaves there, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprise.errors import MismatchError
from reprise.loading.reader import Checkpoint
from reprise.nested.documents import StoredState, read_values
from reprise.nested.loaded import LoadedState, Matched, Strictness, match
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
        taken: what the tree takes from the checkpoint at hand beside its own tensors.
        matched: all tensors to fill from it.
        unknown: its entries that no module takes.
    """

    tree: Tree
    tensors: Sequence[LiveTensor]
    joint: JointTable
    strict: Strictness
    taken: Taken = field(init=False)
    matched: Matched = field(init=False)
    unknown: list[str] = field(default_factory=list)

    @own_modes()
    def live(self, checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in a checkpoint.

        Raises:
            MismatchError: listing what does not fit.
        """
        tree, joint, stored = self.tree, self.joint, read_values(checkpoint)
        source = self.taken = Taken(checkpoint, stored, tree)
        missing = [*source.take_optimizers(self.strict), *source.take_values(joint.values), *source.take_states()]
        if tree.takes_rest:
            source.take_rest({MODEL, OPTIMIZER[0], PER_RANK, *joint.entries})

        def is_asked(keys: Keys) -> bool:
            return keys[0] in joint.entries and not ("rng" in tree.declined and is_random_state(keys))

        pointers = joint.values | source.values.keys()
        values = [stored.at(keys_of_pointer(where)) for where in pointers]
        value_names = {source.target(at.name) for v in values if type(v) is not ByLeaf for at in references(v)}
        other_names = source.other_names(joint.aliases)
        modules = [keys for keys, member in tree.objects.items() if isinstance(member, torch.nn.Module)]
        self.matched = match(
            checkpoint,
            [*source.own_tensors(self.tensors, other_names), *source.new],
            strict=self.strict,
            models=[(MODEL,), *modules],
            is_asked=lambda spec: is_asked(keys_of(spec.kind, spec.name)) and spec.name not in value_names,
            requested_names=[other_names.get(spec.name, spec.name) for spec in joint.specs],
            missing=missing,
            unexpected=sorted(pointer(keys) for keys in _untaken(stored, pointers) if is_asked(keys)),
        )
        return self.matched.live

    def finish(self) -> None:
        """Replace the values, after this rank has filled its tensors. A second call does the same again.

        Raises:
            MismatchError: if an object does not take its state.
        """
        with own_modes():  # the versions of all tensors rise, of DTensors and ties too
            torch.autograd.graph.increment_version([stored.tensor for stored in self.tree.tensors.values()])
            self.tree.put_tensors(self.matched.missing)
            self.taken.put()
        self.taken.give()  # in the modes of the caller, whose code it is
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
        values = self.taken.rest()
        if is_first:
            log_untaken(checkpoint, self.taken.stored, self.tree, self.joint.entries, values)
            log_options(checkpoint, self.tree, self.taken.numbers)
        return LoadedState({**values, "iteration": checkpoint.iteration}, matched.missing, matched.unexpected)


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
