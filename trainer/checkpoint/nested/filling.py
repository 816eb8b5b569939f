"""Fills a nested state dict from a checkpoint: finds each of its leaves there, and replaces the values at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.layout import TensorSpec
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.nested.documents import NestedValues, read_values
from trainer.checkpoint.nested.loaded import LoadedState, Matched, match
from trainer.checkpoint.nested.stored_names import keys_of, keys_of_pointer, pointer
from trainer.checkpoint.nested.table import JointTable
from trainer.checkpoint.nested.tree import ParameterGroup, Tree, as_given
from trainer.checkpoint.optimizer_state import zeros_for
from trainer.checkpoint.tensors.live import Grid, LiveTensor, locate
from trainer.errors import MismatchError

_Made = dict[tuple[str, str], Any]  # by the names of a parameter and of its state


@dataclass(slots=True)
class Filling:
    """One load into a nested state dict, on one rank.

    Args:
        tensors: this rank's, with the ranks that hold the same boxes.
        joint: the table of all ranks.
        made: by the optimizer's pointer, the state that was made for the checkpoint at hand.
    """

    tree: Tree
    tensors: Sequence[LiveTensor]
    joint: JointTable
    strict: bool
    matched: Matched = field(default_factory=lambda: Matched([]))
    made: dict[str, _Made] = field(default_factory=dict)

    def live(self, checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        """Return the tensors to fill, under their names in a checkpoint.

        Raises:
            MismatchError: listing what does not fit.
        """
        values, joint = read_values(checkpoint), self.joint
        self.made = {where: {} for where in self.tree.optimizers}
        made = list(self._make_tensors(checkpoint))
        self._make_values(values)
        asked = {
            where
            for where, value in values.values.items()
            if keys_of_pointer(where)[0] in joint.entries and value != {}
        }
        made_values = {
            pointer((*keys_of_pointer(where), "state", name, key))
            for where, made_state in self.made.items()
            for (name, key) in made_state
        }
        missing = [where for where, value in self.tree.values.items() if where not in values.values and value != {}]
        missing += list(self._groups_missing(values))
        other_names = self._other_names(checkpoint)
        tensors = [
            replace(tensor, spec=replace(tensor.spec, name=other_names.get(tensor.spec.name, tensor.spec.name)))
            for tensor in self.tensors
        ]
        self.matched = match(
            checkpoint,
            [*tensors, *made],
            strict=self.strict,
            is_asked=lambda spec: keys_of(spec.kind, spec.name)[0] in joint.entries,
            others=[other_names.get(spec.name, spec.name) for spec in joint.specs],
            missing=missing,
            unexpected=sorted(asked - joint.values - made_values),
        )
        return self.matched.live

    def finish(self, checkpoint: Checkpoint, *, is_first: bool) -> LoadedState:
        """Replace the values, once every rank has filled its tensors.

        Args:
            is_first: whether this is the one rank that logs what is the same on all.
        """
        values = read_values(checkpoint)
        for where in self.tree.values:
            if where in values.values:
                self.tree.replace_value(where, values.values[where])
        for where, optimizer in self.tree.optimizers.items():
            for (name, key), value in self.made[where].items():
                optimizer.state.setdefault(optimizer.keys[name], {})[key] = value
            by_name = _numbers_of(values, where)
            for group in optimizer.groups:
                for key, value in (by_name.get(group.names[0], {}) if group.names else {}).items():
                    if key in group.numbers:
                        group.given[key] = as_given(group.given[key], value)
        self.matched.log(checkpoint, is_first=is_first)
        return LoadedState({"iteration": checkpoint.iteration}, self.matched.missing, self.matched.unexpected)

    def _other_names(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return, for tied tensors that the checkpoint does not have under their first name, another that it has."""
        there = {*read_places(checkpoint), *checkpoint.manifest.aliases}
        aliases = self.joint.aliases.items()
        return {name: alias for alias, name in aliases if name not in there and alias in there}

    def _groups_missing(self, values: NestedValues) -> Iterator[str]:
        """Yield the parameter groups that the checkpoint does not have.

        Raises:
            MismatchError: for one whose parameters were in groups of different numbers.
        """
        for where, optimizer in self.tree.optimizers.items():
            by_name = _numbers_of(values, where)
            for number, group in enumerate(optimizer.groups):
                if any(name not in by_name for name in group.names):
                    yield f"{where}/param_groups/{number}"
                elif self.strict:
                    _require_one(f"{where}/param_groups/{number}", group, by_name)

    def _make_tensors(self, checkpoint: Checkpoint) -> Iterator[LiveTensor]:
        """Make the tensors that an optimizer lacks, as before its first step."""
        for where, optimizer in self.tree.optimizers.items():
            on_device = any(g.given.get("fused") or g.given.get("capturable") for g in optimizer.groups)
            for spec in (place.spec for place in read_places(checkpoint).values()):
                *parents, name, key = ("", *keys_of(spec.kind, spec.name))
                if pointer(parents[1:]) == f"{where}/state" and optimizer.lacks(name, key):
                    parameter = optimizer.parameters[name]
                    made = zeros_for(parameter, key, spec, on_device=on_device, where=checkpoint.path)
                    self.made[where][name, key] = made
                    yield from _alone(spec, made)

    def _make_values(self, values: NestedValues) -> None:
        for where, optimizer in self.tree.optimizers.items():
            for at, value in values.values.items():
                *parents, name, key = ("", *keys_of_pointer(at))
                if pointer(parents[1:]) == f"{where}/state" and optimizer.lacks(name, key):
                    self.made[where][name, key] = value


def _numbers_of(values: NestedValues, where: str) -> dict[str, Json]:
    """Return the numbers of each parameter's group in a checkpoint, by the parameter's name."""
    return {name: group["numbers"] for group in values.groups.get(where, ()) for name in group["names"]}


def _require_one(where: str, group: ParameterGroup, by_name: Mapping[str, Json]) -> None:
    for name in group.names[1:]:
        if by_name[name] != by_name[group.names[0]]:
            raise MismatchError(
                "The parameters of a group were in groups of different numbers",
                where=where,
                expected=f"those of {group.names[0]}, {by_name[group.names[0]]}",
                found=f"{name} with {by_name[name]}",
                fix="Divide the parameters into groups as when the checkpoint was saved.",
            )


def _alone(spec: TensorSpec, tensor: torch.Tensor) -> Iterator[LiveTensor]:
    """Yield a tensor that was made for this load, which other ranks are not compared on."""
    for found in locate(spec.kind, spec.name, tensor, grid=Grid.flat(1)):
        yield replace(found, replicas=())
