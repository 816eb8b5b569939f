"""A rank's tensors in a state dict, by stored name, with their boxes. Tied tensors are recognized by their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind, refuse_unstorable
from reprise.nested.agreement import KnownTables
from reprise.nested.stored_names import MODEL, Keys, stored_name
from reprise.nested.table import JointTable, table_of
from reprise.nested.tree import Tree
from reprise.tensors.live import LiveTensor, check_disjoint, identity_of, memory_holder

# The first of several tied tensors is stored, and PEFT expects all its adapter's tensors in its file.
_ORDER = sorted(TensorKind, key=lambda kind: kind is not TensorKind.ADAPTER)


class HeldTensors:
    """This rank's tensors by stored name, and their table. Saving the same tensors again skips enumerating them.

    Args:
        known: The tables from the ranks' last agreement.
    """

    def __init__(self, known: KnownTables) -> None:
        self.known = known
        self._marks: object = None
        self._live: Mapping[str, LiveTensor] = {}
        self._table = b""
        self._joint: JointTable | None = None  # the table `_located` was made for
        self._located: tuple[LiveTensor, ...] = ()

    def table_of(self, tree: Tree, patterns: Sequence[str]) -> bytes:
        """Return this rank's table; see `table.table_of` for the arguments.

        Raises:
            CheckpointError: See `local_tensors`.
        """
        marks = (_marks(tree), [*patterns], tree.is_whole)
        if marks != self._marks:
            self._live, aliases = local_tensors(tree)
            self._table = table_of(self._live.values(), aliases=aliases, patterns=patterns, is_replicated=tree.is_whole)
            self._marks, self._joint = marks, None
        return self._table

    def with_replicas(self, joint: JointTable, rank: int) -> tuple[LiveTensor, ...]:
        """Return the tensors with all ranks saving the same boxes, in the joint table's order.

        Return the same tuple if nothing has changed.
        """
        if joint is self._joint:
            return self._located
        tensors = []
        for spec in joint.specs:
            if (tensor := self._live.get(spec.name)) is not None:
                holders = joint.holders[spec.name][tensor.box]
                tensors.append(replace(tensor, replicas=holders, is_copy=rank not in holders))
        self._located, self._joint = tuple(tensors), joint
        return self._located


def local_tensors(tree: Tree) -> tuple[dict[str, LiveTensor], dict[str, str]]:
    """Return this rank's part of every tensor in a state dict, and the second names for tied tensors.

    Raises:
        CheckpointError: A tensor cannot be stored, its part is not a box, or it shares memory with another.
    """
    live: dict[str, LiveTensor] = {}
    aliases: dict[str, str] = {}
    names_by_identity: dict[object, str] = {}
    places: dict[Keys, tuple[TensorKind, str]] = {(MODEL, name): place for name, place in tree.form.stored_as.items()}
    rows = [(*places.get(keys, stored_name(keys)), keys) for keys in tree.tensors]
    for kind, name, keys in sorted(rows, key=lambda row: _ORDER.index(row[0])):
        stored = tree.tensors[keys]
        identity = identity_of(stored.tensor)
        if keys in places and (own_name := stored_name(keys)[1]) != name:
            aliases[own_name] = names_by_identity.get(identity, name)
        first_name = names_by_identity.get(identity)
        if first_name != name and (name in live or name in aliases):
            raise CheckpointError(
                "Two tensors in a state dict have the same stored name",
                where=name,
                found="/".join(keys),
                fix="Weights have their own names, and optimizer state is KEY.NAME: rename one of them.",
            )
        if first_name is not None:
            aliases |= {} if first_name == name else {name: first_name}
            continue
        for tensor_of_rank in stored.parts(kind, name):
            live[name] = tensor_of_rank
            names_by_identity[identity] = name
    refuse_unstorable(tensor.spec for tensor in live.values())  # before NumPy, which has at most 64 dimensions
    check_disjoint([(name, tensor.local) for name, tensor in live.items()])
    return live, aliases


def _marks(tree: Tree) -> object:
    """Return a value that changes if a tensor's memory, position in memory or name changes."""
    marks: list[object] = [*tree.tensors, *tree.form.stored_as.items()]
    for stored in tree.tensors.values():
        tensor, local = stored.tensor, memory_holder(stored.tensor)
        if local is not tensor:
            marks += (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        marks += (identity_of(tensor), stored.box, stored.shape, local.device)
    return marks
