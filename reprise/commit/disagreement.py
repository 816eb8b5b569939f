"""Finds disagreements between the ranks of a save in their offers and explains them from two ranks' tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.commit.report import GroupDigest, Offer
from reprise.errors import CheckpointError, ReplicaError, TrainerError

_MOST_NAMED = 3
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The ranks of a save, grouped by the value on which they differ.

    Args:
        sides: the ranks with equal values, the side of the lowest rank first.
        is_of_content: whether the ranks hold the same tensors with different bits.
    """

    sides: tuple[tuple[int, ...], ...]
    is_of_content: bool = False

    @property
    def witnesses(self) -> tuple[int, int]:
        """Return a rank of each of the first two sides, whose tables show the difference."""
        return self.sides[0][0], self.sides[1][0]


def refuse_other_iterations(iterations: Mapping[int, int]) -> None:
    """Refuse a save in which ranks save different iterations, given by rank.

    Raises:
        CheckpointError: naming the iterations and the ranks.
    """
    sides = _sides(iterations)
    if len(sides) > 1:
        raise CheckpointError(
            "The ranks save different iterations",
            expected="the same iteration on every rank",
            found="; ".join(f"iteration {iterations[side[0]]} on {_ranks_text(side)}" for side in sides),
            fix="Nothing was saved. Give all ranks the same iteration.",
        )


def find(offers: Mapping[int, Offer]) -> Disagreement | None:
    """Return the first disagreement in the offers, given by rank in ascending order; None if the ranks agree."""
    sides = _sides({rank: offer.identity for rank, offer in offers.items()})
    if len(sides) > 1:
        return Disagreement(sides)
    return between_groups({rank: offer.groups for rank, offer in offers.items()})


def between_groups(groups_by_rank: Mapping[int, Sequence[GroupDigest]]) -> Disagreement | None:
    """Return the first disagreement between replicas, given by rank in ascending order; None if there is none."""
    boxes: dict[int, dict[int, object]] = defaultdict(dict)
    contents: dict[int, dict[int, object]] = defaultdict(dict)
    for rank, groups in groups_by_rank.items():
        for group in groups:
            boxes[group.ranks][rank] = group.size, group.boxes
            contents[group.ranks][rank] = group.content
    for by_group, is_of_content in ((boxes, False), (contents, True)):
        for values in by_group.values():
            sides = _sides(values)
            if len(sides) > 1:
                return Disagreement(sides, is_of_content)
    return None


def explain(disagreement: Disagreement, tables: Sequence[bytes], *, fix: str = "") -> TrainerError:
    """Return an error with the ranks and the first different tensors.

    Args:
        tables: `Inventory.to_bytes` of the two witnesses, in their order.
        fix: advice before the advice on replicas.
    """
    a, b = disagreement.witnesses
    rows, other_rows = ({row["name"]: row for row in json.loads(table)} for table in tables)
    differences = [
        text
        for name in {**rows, **other_rows}
        if (text := _difference(name, rows.get(name), other_rows.get(name), (a, b)))
    ]
    if not differences and list(rows) != list(other_rows):
        differences = [f"the order of the tensors on rank {a} and rank {b}"]
    details = "; ".join(differences[:_MOST_NAMED]) or f"rank {a} and rank {b}"
    count = f"{len(differences)} differences, the first: " if len(differences) > _MOST_NAMED else ""
    if disagreement.is_of_content:
        sides = " against ".join(_ranks_text(side) for side in disagreement.sides)
        return ReplicaError(
            "Replicas of the same tensor hold different bits",
            expected="the same bits on all ranks that hold a tensor",
            found=f"{count}{details}; {sides}",
            fix=f"{fix}Resume from the newest checkpoint. If it happens again, the memory of one of these hosts cannot "
            "be trusted, or the program lets its replicas drift.",
        )
    return CheckpointError(
        "The ranks do not save the same tensors",
        expected="the same table of tensors on every rank",
        found=f"{count}{details}",
        fix="Nothing was saved. Give all ranks the same model and optimizer: the stages of a pipeline, which differ by "
        "rank, cannot be saved like this. `save_state_dict` saves them.",
    )


def _difference(name: str, row: _Row | None, second_row: _Row | None, ranks: tuple[int, int]) -> str | None:
    """Return the contradiction between two ranks' rows of a tensor, or None.

    Ranks may hold different boxes of a tensor, or none. Boxes must be equal only if both rows list the same replicas.
    """
    if row is None or second_row is None:
        return f"{name} only on rank {ranks[0] if second_row is None else ranks[1]}"
    keys = [key for key in ("dtype", "shape", "kind", "file") if row.get(key) != second_row.get(key)]
    if keys:
        first, second = (" ".join(str(values[key]) for key in keys) for values in (row, second_row))
        return f"{name} is {first} on rank {ranks[0]} and {second} on rank {ranks[1]}"
    if row.get("ranks") is None or row["ranks"] != second_row.get("ranks"):
        return None
    if (row["offset"], row["box"]) != (second_row["offset"], second_row["box"]):
        return f"{name}{_box(row)} on rank {ranks[0]} and{_box(second_row) or ' all of it'} on rank {ranks[1]}"
    return f"{name}{_box(row)}" if row.get("digest") != second_row.get("digest") else None


def _box(row: _Row) -> str:
    """Return the box of a row in words, empty for the whole tensor."""
    is_whole = "box" not in row or (not any(row["offset"]) and list(row["box"]) == list(row["shape"]))
    return "" if is_whole else f" (the box at {row['offset']} of {row['box']})"


def _sides(answers: Mapping[int, object]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by equal answers, in the order in which the answers first appear."""
    sides: dict[object, list[int]] = defaultdict(list)
    for rank, answer in answers.items():
        sides[answer].append(rank)
    return tuple(tuple(side) for side in sides.values())


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, at most the first eight by number."""
    text = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
