"""What each rank has of its own, and the checks of it: a load puts it back on as many ranks only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.loading.reader import Checkpoint
from reprise.nested.documents import read_values
from reprise.nested.random_state import RandomState
from reprise.nested.stored_names import PER_RANK, Keys, keys_of_pointer

OwnState = tuple[int, list[dict[str, Any]]]  # a rank, and dicts with what it has

_RNG = "rng"


def own_state(rank: int, per_rank: Mapping[str, object] | None, *, rng: bool | None) -> OwnState | None:
    """Return a rank and its own values, for `tree_of`; None without any.

    Raises:
        CheckpointError: for a key of `per_rank` reserved for the random state.
    """
    if not per_rank and not rng:
        return None
    container = per_rank if isinstance(per_rank, dict) else dict(per_rank or {})
    if not rng:
        return rank, [container]
    if _RNG in container:
        raise CheckpointError(
            "`per_rank` has a key that stands for the random state", found=_RNG, fix="Rename it, or leave rng=True out."
        )
    return rank, [container, {_RNG: RandomState()}]


def is_random_state(keys: Keys) -> bool:
    """Return whether keys lead to the random state of a rank, or below it."""
    return keys[0] == PER_RANK and keys[2:3] == (_RNG,)


def check_ranks(checkpoint: Checkpoint, world_size: int) -> None:
    """Refuse what each rank had of its own, if other numbers of ranks save and load.

    Raises:
        MismatchError: naming the numbers.
    """
    keys = map(keys_of_pointer, read_values(checkpoint).values)
    saved = {inner[1] for inner in keys if inner[0] == PER_RANK}
    if saved and len(saved) != world_size:
        raise MismatchError(
            "The checkpoint has random state or other state of each rank, of another number of ranks",
            where=checkpoint.path,
            expected=f"{count_of(world_size, 'rank')}, as those that load",
            found=f"{count_of(len(saved), 'rank')}, as those that saved",
            fix="Load on as many ranks, or without rng=True and per_rank.",
        )
