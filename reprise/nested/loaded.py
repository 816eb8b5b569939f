"""A load's result: its values, and log lines about what it ignored, replaced, or did not find."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from reprise.errors import count_of, first_of
from reprise.nested.documents import StoredState
from reprise.nested.stored_names import MODEL, OPTIMIZER, PER_RANK, RNG, keys_of_pointer
from reprise.nested.tree import Tree
from reprise.nested.typed_values import ByLeaf

_log = logging.getLogger(__name__)

# Which names missing on a side are refused: True all, "missing" those the checkpoint lacks, False none.
Strictness = bool | Literal["missing"]


class LoadedState(dict[str, Any]):
    """A load's returned values, with the missing names it allowed.

    Attributes:
        missing_keys: Names requested by this rank and missing in the checkpoint. Their values were kept.
        unexpected_keys: Names in the checkpoint requested by no rank.
    """

    def __init__(
        self, values: Mapping[str, Any], missing_keys: Iterable[str] = (), unexpected_keys: Iterable[str] = ()
    ) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


def log_result(
    path: Path, result: LoadedState, stored: StoredState, tree: Tree, entries: Collection[str], *, is_first: bool
) -> None:
    """Log the names missing on either side, and a checkpoint's unrequested state, unless the call declines it.

    Weights and the optimizer under `"optimizer"` are never listed as unrequested, since the call shows whether they are
    requested. A state dict load, which often requests only weights, lists them only if it includes an optimizer.
    Returned values count as requested, except those from an object such as a scheduler.

    Args:
        entries: The outermost keys passed by any rank.
        is_first: Whether this rank logs the lines common to all ranks.
    """
    missing, unexpected = result.missing_keys, result.unexpected_keys
    if unexpected and is_first:
        _log.warning(
            f"not loaded from {path}: {count_of(len(unexpected), 'tensor')} not requested: {first_of(unexpected, 5)}"
        )
    if missing:
        _log.warning(f"not in {path}, and kept: {count_of(len(missing), 'name')}: {first_of(missing, 5)}")
    dicts = {key: value for key, value in stored.root.items() if isinstance(value, dict)}
    objects = {key for key, value in dicts.items() if value and type(value) is not ByLeaf}
    requested = {MODEL, OPTIMIZER[0], PER_RANK, *entries, *(result.keys() - objects)}
    tops = [*stored.root, *(keys_of_pointer(where)[0] for where in stored.groups if where)]
    unrequested = [("state", top) for top in tops if top not in requested]
    if PER_RANK not in entries:
        own_keys = (key for rank in stored.members(PER_RANK) for key in stored.members(PER_RANK, rank))
        unrequested += [(RNG if key == RNG else PER_RANK, key) for key in own_keys]
    names = [name for argument, name in unrequested if argument not in tree.declined]
    if names and is_first and (tree.returns or tree.optimizers):
        hint = "; pass False or an empty dict to silence this" if tree.returns else ""
        _log.warning(f"{path} has state that this load did not request: {', '.join(dict.fromkeys(names))}{hint}")
