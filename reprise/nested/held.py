"""A rank's tensors of a state dict, by stored name, with their boxes; tied tensors are found by memory."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind, TensorSpec, refuse_unstorable
from reprise.nested.stored_names import Keys, stored_name
from reprise.nested.table import JointTable, Table, TableRow, require_whole
from reprise.nested.tree import Tree
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.live import (
    Grid,
    LiveTensor,
    check_byteorder,
    check_disjoint,
    check_memory,
    local_of,
    locate,
    memory_holder,
)

# Of tied tensors the first is stored: PEFT looks for all of an adapter in its file.
_ORDER = sorted(TensorKind, key=lambda kind: kind is not TensorKind.ADAPTER)


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """This rank's tensors by stored name, without the other ranks of each, and the second names of tied tensors."""

    live: Mapping[str, LiveTensor]
    aliases: Mapping[str, str]

    def table(self, tree: Tree, patterns: Sequence[str], *, is_replicated: bool = False) -> Table:
        """Return the table of this rank; see `Table` for the arguments."""
        rows = {name: TableRow(tensor.spec, tensor.box) for name, tensor in self.live.items()}
        return Table(rows, self.aliases, tree.entries, (*tree.values, *tree.receivers), patterns, is_replicated)

    def shared(self, joint: JointTable, rank: int, patterns: Sequence[str] = ()) -> tuple[LiveTensor, ...]:
        """Return the tensors with all ranks of the same boxes, in the order of the joint table.

        Args:
            patterns: as for `table`; of these tensors the first rank with a box saves it.
        """
        tensors = []
        for spec in joint.specs:
            tensor = self.live.get(spec.name)
            if tensor is None:
                continue
            holders = joint.holders[spec.name][tensor.box]
            if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns):
                tensors.append(replace(tensor, replicas=holders[:1], is_copy=rank != holders[0]))
            else:
                tensors.append(replace(tensor, replicas=holders))
        return tuple(tensors)


@dataclass(slots=True)
class LastTensors:
    """The tensors of the last save of a saver; the next save of the same ones enumerates nothing.

    Args:
        marks: see `_marks`.
        table: this rank's, for `given`: what it is made of beside the tensors.
        joint: the table of all ranks for which `live` was made.
    """

    marks: object = None
    held: HeldTensors = field(default_factory=lambda: HeldTensors({}, {}))
    given: object = None
    table: Table = field(default_factory=lambda: Table({}))
    joint: JointTable | None = None
    live: tuple[LiveTensor, ...] = ()

    def table_of(self, tree: Tree, patterns: Sequence[str], *, is_replicated: bool) -> Table:
        """Return the table of this rank, the same object if nothing has changed; see `Table` for the arguments.

        Raises:
            CheckpointError: as `local_tensors`.
        """
        marks = _marks(tree)
        if marks != self.marks:
            self.held, self.given, self.joint = local_tensors(tree), None, None
            self.marks = marks
        arguments = (tree.entries, tuple(tree.values), tuple(patterns), is_replicated)
        if arguments != self.given:
            self.table = self.held.table(tree, patterns, is_replicated=is_replicated)
            self.given = arguments
        return self.table

    def shared(self, joint: JointTable, rank: int, patterns: Sequence[str]) -> tuple[LiveTensor, ...]:
        """Return the tensors with all their ranks, the same tuple if nothing has changed.

        Raises:
            CheckpointError: as `require_whole` and `require_patterns`.
        """
        if joint is not self.joint:
            require_whole(joint)
            require_patterns(patterns, joint)
            self.live = self.held.shared(joint, rank, patterns)
            self.joint = joint
        return self.live


def local_tensors(tree: Tree) -> HeldTensors:
    """Return this rank's part of every tensor of a state dict.

    Raises:
        CheckpointError: naming an unstorable tensor, a part that is no box, or a tensor in the memory of another.
    """
    check_byteorder(sys.byteorder)
    live: dict[str, LiveTensor] = {}
    aliases: dict[str, str] = {}
    names_by_identity: dict[object, str] = {}
    rows = [(*tree.stored_as.get(keys, stored_name(keys)), keys) for keys in tree.tensors]
    for kind, name, keys in sorted(rows, key=lambda row: _ORDER.index(row[0])):
        stored = tree.tensors[keys]
        tensor = stored.tensor
        local = local_of(tensor)
        if local.is_meta:
            raise CheckpointError("A tensor has no memory", where=name, found="device meta", fix="Materialize it.")
        check_memory(name, local)
        identity = _identity(tensor, local)
        if keys in tree.stored_as and (own_name := stored_name(keys)[1]) != name:
            aliases[own_name] = names_by_identity.get(identity, name)
        if identity in names_by_identity:
            if names_by_identity[identity] != name:
                _require_free_name(aliases, live, name, keys)
                aliases[name] = names_by_identity[identity]
            continue
        parts = locate(kind, name, tensor, grid=Grid.flat(1))
        if stored.box is not None:
            spec = TensorSpec(kind, name, stored.shape, stored_dtype(local.dtype, where=name), stored.shape)
            parts = iter([LiveTensor(spec, stored.box, local, ())])
        for tensor_of_rank in parts:
            _require_free_name(live, aliases, name, keys)
            live[name] = tensor_of_rank
            names_by_identity[identity] = name
    check_disjoint([(name, tensor.local) for name, tensor in live.items()])
    refuse_unstorable(tensor.spec for tensor in live.values())
    return HeldTensors(live, aliases)


def require_patterns(patterns: Sequence[str], joint: JointTable) -> None:
    """Refuse a pattern of `from_rank0` without a match on any rank.

    Raises:
        CheckpointError: naming it.
    """
    unused = [p for p in patterns if not any(fnmatch.fnmatchcase(spec.name, p) for spec in joint.specs)]
    if unused:
        raise CheckpointError(
            "A pattern in from_rank0 fits no tensor",
            found=", ".join(sorted(unused)),
            fix="Correct it, or leave it out; the manifest of a checkpoint lists the names of its tensors.",
        )


def _identity(tensor: torch.Tensor, local: torch.Tensor) -> object:
    """Return a value equal for two tensors exactly if they are the same memory with the same shape."""
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), tuple(tensor.shape), tuple(local.shape), local.stride(), local.dtype


def _marks(tree: Tree) -> object:
    """Return a value that changes if a tensor has other memory, another place in it, or another name."""
    marks: list[object] = [*tree.tensors, *tree.stored_as.items()]
    try:
        for stored in tree.tensors.values():
            tensor = stored.tensor
            if stored.box is not None:
                marks += (tensor.shape, stored.box, stored.shape)
            local = memory_holder(tensor)
            if local is not tensor:
                marks += (tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
            marks += (local.untyped_storage()._cdata, local.data_ptr(), local.shape, local.stride(), local.dtype)
            marks += (local.device, type(local), local.is_neg(), local.is_conj())
    except RuntimeError:  # a tensor without plain memory, which `local_tensors` names
        return object()
    return marks


def _require_free_name(into: Mapping[str, object], further: Mapping[str, object], name: str, keys: Keys) -> None:
    if name in into or name in further:
        raise CheckpointError(
            "Two tensors of a state dict have one stored name",
            where=name,
            found="/".join(keys),
            fix="Weights have their own names, and optimizer state is KEY.NAME: rename one of them.",
        )
