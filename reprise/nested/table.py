"""The tensor tables exchanged by ranks as JSON: each rank's own table, and the joint table for all ranks."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.errors import CheckpointError, first_of
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.format.manifest import digest_of
from reprise.nested.stored_names import PER_RANK, order_of
from reprise.tensors.live import LiveTensor

Place = tuple[tuple[int, ...], tuple[int, ...]]  # a box's offset and shape


def table_of(
    live: Iterable[LiveTensor],
    *,
    aliases: Mapping[str, str],
    patterns: Sequence[str],
    is_replicated: bool,
) -> bytes:
    """Return a rank's state dict, without its values, as a message.

    Args:
        aliases: Second tensor names, alias -> stored name.
        patterns: Name patterns for tensors with different values on different ranks by design. Only the coordinator's
            count: the first rank with each box saves it.
        is_replicated: Whether every rank passes all tensors, with rows in model order. Otherwise each rank passes its
            own tensors, and the joint table is sorted by name alone.
    """
    rows = {
        tensor.spec.name: [
            tensor.spec.kind.value,
            tensor.spec.dtype.name,
            tensor.spec.shape,
            tensor.box.offset,
            tensor.box.shape,
        ]
        for tensor in live
    }
    return json.dumps([{**rows, **aliases}, sorted(patterns), is_replicated]).encode()


class Differences:
    """Compares what the ranks pass under the same name.

    Args:
        words: Describes a rank's content.

    Attributes:
        first: By name, the first rank with the name, and its content.
        problems: The differences.
    """

    def __init__(self, words: Callable[[Any], str]) -> None:
        self._words = words
        self.first: dict[str, tuple[int, Any]] = {}
        self.problems: list[str] = []

    def add(self, name: str, rank: int, content: object) -> None:
        """Compare a rank's content with that of the first rank with this name."""
        first_rank, first = self.first.setdefault(name, (rank, content))
        if first != content:
            self.problems.append(
                f"{name} is {self._words(first)} on rank {first_rank} and {self._words(content)} on rank {rank}"
            )


@dataclass(frozen=True, slots=True)
class JointTable:
    """The state dict for all ranks together, without its values.

    Args:
        specs: Every tensor, in the order of `order_of`.
        holders: By stored name, the ranks that save each box, ascending.
        digest: The message digest.
    """

    specs: tuple[TensorSpec, ...]
    holders: Mapping[str, Mapping[Box, tuple[int, ...]]]
    aliases: Mapping[str, str]
    digest: str

    @staticmethod
    def from_text(text: str) -> JointTable:
        """Return the table in a message from `join`."""
        rows, aliases = json.loads(text)
        holders = {
            name: {Box(tuple(offset), tuple(shape)): tuple(ranks) for offset, shape, ranks in boxes}
            for name, *_, boxes in rows
        }
        specs = tuple(_spec(*row) for *row, _ in rows)
        return JointTable(specs, holders, aliases, digest_of(text.encode()))


def join(tables: Mapping[int, bytes]) -> str:
    """Join the tables, passed by rank with the coordinator first, and return the joint table as a message.

    Raises:
        CheckpointError: A tensor differs between ranks.
    """
    parsed = {data: json.loads(data) for data in {*tables.values()}}
    by_rank = {rank: parsed[data] for rank, data in sorted(tables.items())}
    *_, patterns, is_replicated = parsed[next(iter(tables.values()))]
    comparison = Differences(_words)  # each tensor's kind, dtype and shape, and each alias's stored name
    first = comparison.first
    holders: dict[str, dict[Place, list[int]]] = {}
    for rank, (rows, *_) in by_rank.items():
        for name, row in rows.items():
            if isinstance(row, str):
                comparison.add(name, rank, row)
                continue
            *tensor, offset, shape = row
            comparison.add(name, rank, tensor)
            holders.setdefault(name, {}).setdefault((tuple(offset), tuple(shape)), []).append(rank)
    refuse(
        comparison.problems, "The ranks pass different tensors under the same name", "Give each tensor its own name."
    )
    place_of, aliases = None, {name: entry for name, (_, entry) in sorted(first.items()) if name not in holders}
    if is_replicated:
        differences = [
            f"{name} is on rank {first[name][0]} and not on rank {rank}"
            for name in holders
            for rank, (rows, *_) in by_rank.items()
            if name not in rows and not name.startswith(f"/{PER_RANK}/")
        ]
        fix = "Pass the same on every rank. Use `save_state_dict` for different tensors, such as pipeline stages."
        refuse(differences, "The ranks pass different models or optimizers", fix)
        places = {name: (place,) for place, name in enumerate(first)}
        place_of = (places | {alias: places[name] for alias, name in aliases.items()}).__getitem__
    specs = [_spec(name, *first[name][1]) for name in holders]
    rows = []
    for spec in sorted(specs, key=lambda spec: order_of(spec, place_of)):
        most = 1 if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns) else None
        boxes = [[*box, ranks[:most]] for box, ranks in sorted(holders[spec.name].items())]
        rows.append([spec.name, *first[spec.name][1], boxes])
    return json.dumps([rows, aliases])


def refuse(problems: Sequence[str], what: str, fix: str) -> None:
    """Refuse a call if there are problems.

    Raises:
        CheckpointError: Lists the first ones.
    """
    if problems:
        text = first_of(problems, 8, "; ")
        raise CheckpointError(what, found=text, fix=f"Nothing was read or written. {fix}")


def _words(entry: Any) -> str:
    return f"tied to {entry}" if isinstance(entry, str) else "{1} {2} ({0})".format(*entry)


def _spec(name: str, kind: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(TensorKind(kind), name, tuple(shape), StoredDtype[dtype], tuple(shape))
