"""The table of a rank's tensors to save or fill, and the joint table of all ranks."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from reprise.errors import CheckpointError
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.nested.stored_names import PER_RANK, order_of

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class TableRow:
    """A rank's part of a tensor."""

    spec: TensorSpec
    box: Box


@dataclass(frozen=True, slots=True)
class Table:
    """The state dict of one rank, without its values.

    Args:
        rows: by stored name.
        aliases: second names of its tensors, alias -> stored name.
        entries: the outermost keys.
        values: JSON Pointers of all other values.
        patterns: of the names of tensors with differences between ranks by design; the same on all ranks.
        is_replicated: whether every rank gives all tensors, and rows are in the order of the model; else each rank
            gives its own, and the joint table has an order by names alone.
    """

    rows: Mapping[str, TableRow]
    aliases: Mapping[str, str] = field(default_factory=dict)
    entries: Sequence[str] = ()
    values: Sequence[str] = ()
    patterns: Sequence[str] = ()
    is_replicated: bool = False

    def to_bytes(self) -> bytes:
        """Return the table as JSON."""
        rows = [
            [
                name,
                row.spec.kind.value,
                row.spec.dtype.name,
                row.spec.shape,
                row.box.offset,
                row.box.shape,
            ]
            for name, row in self.rows.items()
        ]
        members = [rows, dict(self.aliases), list(self.entries), list(self.values), sorted(self.patterns)]
        return json.dumps([*members, self.is_replicated]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Table:
        """Return the table in a message."""
        rows, aliases, entries, values, patterns, is_replicated = json.loads(data)
        rows_by_name = {
            name: TableRow(_spec(kind, name, shape, dtype), Box(tuple(offset), tuple(box)))
            for name, kind, dtype, shape, offset, box in rows
        }
        return Table(rows_by_name, aliases, entries, values, patterns, is_replicated)


@dataclass(frozen=True, slots=True)
class JointTable:
    """The state dict of all ranks together, without its values.

    Args:
        specs: every tensor, in the order of `order_of`.
        holders: by stored name, the ranks of each box, in ascending order.
    """

    specs: tuple[TensorSpec, ...]
    holders: Mapping[str, Mapping[Box, tuple[int, ...]]]
    aliases: Mapping[str, str]
    entries: frozenset[str]
    values: frozenset[str]
    digest: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the table as JSON."""
        specs = [[s.kind.value, s.name, s.shape, s.dtype.name] for s in self.specs]
        holders = [
            [[box.offset, box.shape, ranks] for box, ranks in self.holders[spec.name].items()] for spec in self.specs
        ]
        return json.dumps([specs, holders, dict(self.aliases), sorted(self.entries), sorted(self.values)]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> JointTable:
        """Return the table in a message."""
        specs, holders, aliases, entries, values = json.loads(data)
        tensors = tuple(_spec(kind, name, shape, dtype) for kind, name, shape, dtype in specs)
        by_name = {
            spec.name: {Box(tuple(offset), tuple(shape)): tuple(ranks) for offset, shape, ranks in boxes}
            for spec, boxes in zip(tensors, holders, strict=True)
        }
        return JointTable(tensors, by_name, aliases, frozenset(entries), frozenset(values), digest_of(data))


def digest_of(data: bytes) -> bytes:
    """Return the digest (xxh3-128) by which ranks compare messages without sending them."""
    return xxhash.xxh3_128_digest(data)


def join(tables: Mapping[int, Table]) -> JointTable:
    """Return the table of all ranks, given by rank.

    Raises:
        CheckpointError: naming a tensor or a pattern with a difference between ranks.
    """
    _require_patterns({rank: sorted(table.patterns) for rank, table in sorted(tables.items())})
    first: dict[str, tuple[int, TableRow]] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    aliases: dict[str, tuple[int, str]] = {}
    problems: list[str] = []
    for rank, table in sorted(tables.items()):
        for name, row in table.rows.items():
            first_rank, first_row = first.setdefault(name, (rank, row))
            if first_row.spec != row.spec:
                problems.append(f"{name} is {_words(first_row)} on rank {first_rank} and {_words(row)} on rank {rank}")
            holders[name][row.box].append(rank)
        for alias, name in table.aliases.items():
            first_rank, known_name = aliases.setdefault(alias, (rank, name))
            if known_name != name:
                problems.append(f"{alias} is tied to {known_name} on rank {first_rank} and to {name} on rank {rank}")
    problems += [
        f"{alias} is tied to {name} on rank {rank} and a tensor of its own on rank {first[alias][0]}"
        for alias, (rank, name) in aliases.items()
        if alias in first
    ]
    _refuse(problems, "The ranks give different tensors under one name", "Give each of them its own name.")
    coordinator = tables[min(tables)]
    if coordinator.is_replicated:
        _require_same_tensors(holders, sorted(tables))
        places = {name: (place,) for place, name in enumerate(first)}
        places = {alias: places[name] for alias, (_, name) in aliases.items()} | places
        specs = tuple(
            sorted((row.spec for _, row in first.values()), key=lambda spec: order_of(spec, places.__getitem__))
        )
    else:
        specs = tuple(sorted((row.spec for _, row in first.values()), key=order_of))
    holders_by_name = {
        spec.name: {box: tuple(ranks) for box, ranks in sorted(holders[spec.name].items(), key=_box_order)}
        for spec in specs
    }
    joint = JointTable(
        specs,
        holders_by_name,
        {alias: name for alias, (_, name) in sorted(aliases.items())},
        frozenset(entry for table in tables.values() for entry in table.entries),
        frozenset(where for table in tables.values() for where in table.values),
    )
    return JointTable.from_bytes(joint.to_bytes())


def _require_patterns(by_rank: Mapping[int, Sequence[str]]) -> None:
    first = min(by_rank)
    for rank, patterns in by_rank.items():
        if patterns != by_rank[first]:
            raise CheckpointError(
                "The ranks give different from_rank0",
                expected="the same on every rank",
                found=f"{by_rank[first]} on rank {first} and {patterns} on rank {rank}",
            )


def _require_same_tensors(holders: Mapping[str, Mapping[Box, Sequence[int]]], ranks: Sequence[int]) -> None:
    """Refuse a tensor of which a rank has no part."""
    problems = []
    for name, boxes in holders.items():
        if name.startswith(f"/{PER_RANK}/"):
            continue
        giving = {rank for ranks_of_box in boxes.values() for rank in ranks_of_box}
        lacking = [rank for rank in ranks if rank not in giving]
        if lacking:
            problems.append(f"{name} is on rank {min(giving)} and not on rank {lacking[0]}")
    _refuse(
        problems,
        "The ranks give different models or optimizers",
        "Give the same on every rank. `save_state_dict` saves ranks with different tensors, as stages of a pipeline.",
    )


def require_whole(joint: JointTable) -> None:
    """Refuse a save of a tensor of which the ranks hold a part only, or overlapping parts.

    Raises:
        CheckpointError: naming it.
    """
    problems = []
    for spec in joint.specs:
        elements, size = sum(box.numel for box in joint.holders[spec.name]), math.prod(spec.shape)
        if elements != size:
            ranks = sorted({rank for ranks_of_box in joint.holders[spec.name].values() for rank in ranks_of_box})
            problems.append(f"{spec.name}: {elements} of {size} elements on ranks {', '.join(map(str, ranks))}")
    _refuse(
        problems,
        "The ranks do not hold a tensor exactly once",
        "Let all ranks of its device mesh take part, and hold it in equal or disjoint parts.",
    )


def _refuse(problems: Sequence[str], what: str, fix: str) -> None:
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        text = "; ".join(problems[:_MOST_NAMED]) + more
        raise CheckpointError(what, found=text, fix=f"Nothing was read or written. {fix}")


def _words(row: TableRow) -> str:
    return f"{row.spec.dtype.name} {list(row.spec.shape)} ({row.spec.kind.value})"


def _box_order(item: tuple[Box, object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return item[0].offset, item[0].shape


def _spec(kind: str, name: str, shape: Sequence[int], dtype: str) -> TensorSpec:
    return TensorSpec(TensorKind(kind), name, tuple(shape), StoredDtype[dtype], tuple(shape))
