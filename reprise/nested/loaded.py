"""A load's result: its values, and log lines about what it ignored, replaced, or did not find."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from reprise.errors import ConfigError, count_of
from reprise.nested.documents import StoredState
from reprise.nested.optimizers import ParameterGroup
from reprise.nested.stored_names import MODEL, OPTIMIZER, PER_RANK, is_random_state, keys_of_pointer
from reprise.nested.tree import Tree
from reprise.nested.typed_values import leaves
from reprise.storage.json_file import Json

_log = logging.getLogger(__name__)

# Which names missing on a side are refused: True all, "missing" those the checkpoint lacks, "model" module names,
# False none.
Strictness = bool | Literal["missing", "model"]

_MOST_NAMED = 5
_FLAGS = (bool, str, type(None))


def check_strict(strict: object) -> None:
    """Refuse an invalid `strict`: a misspelled text would refuse less than intended.

    Raises:
        ConfigError: `strict` is not a `Strictness`.
    """
    if type(strict) is not bool and strict not in ("missing", "model"):
        expected = 'True, False, "missing" or "model"'
        raise ConfigError("`strict` is invalid", expected=expected, found=repr(strict))


class LoadedState(dict[str, Any]):
    """A load's returned values, with the missing names it allowed.

    Attributes:
        missing_keys: Names requested by this rank and missing in the checkpoint. Their values were kept.
        unexpected_keys: Names in the checkpoint requested by no rank.
    """

    def __init__(
        self, values: Mapping[str, Any], missing_keys: Sequence[str] = (), unexpected_keys: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


def log_names(path: Path, result: LoadedState, *, is_first: bool) -> None:
    """Log the names missing on either side.

    Args:
        is_first: Whether this rank logs the lines common to all ranks.
    """
    missing, unexpected = result.missing_keys, result.unexpected_keys
    if unexpected and is_first:
        text = f"{count_of(len(unexpected), 'tensor')} not requested: {_first(unexpected)}"
        _log.warning(f"not loaded from {path}: {text}")
    if missing:
        keep = "keeps its value" if len(missing) == 1 else "keep their values"
        _log.warning(f"not in {path}: {count_of(len(missing), 'name')}, which {keep}: {_first(missing)}")


def log_unrequested(
    path: Path, stored: StoredState, tree: Tree, entries: Collection[str], returned: Mapping[str, object]
) -> None:
    """Log a checkpoint's unrequested state, unless the call declines it.

    Weights and the optimizer under `"optimizer"` are never listed, since the call shows whether they are requested. A
    state dict load, which often requests only weights, is logged only if it includes an optimizer. Returned values
    count as requested, except those from an object such as a scheduler.

    Args:
        entries: The outermost keys passed by any rank.
        returned: The values in the result.
    """
    objects = {keys_of_pointer(where)[0] for where, value in stored.values.items() if isinstance(value, dict) and value}
    given_names = {MODEL, OPTIMIZER[0], *entries} | (returned.keys() - objects)
    names = []
    for keys in (*(keys for keys, _ in leaves(stored.root)), *map(keys_of_pointer, filter(None, stored.groups))):
        if keys[0] in given_names:
            continue
        if not tree.returns_unrequested:
            names += [keys[0]] if tree.optimizers else []
            continue
        name, argument = keys[0], "state"
        if is_random_state(keys):
            name, argument = "random state", "rng"
        elif keys[0] == PER_RANK:
            name, argument = "/".join(keys[2:3] or keys), PER_RANK
        names += [f"{name} ({argument}=)"] if argument not in tree.declined else []
    hint = "; pass False or an empty dict to silence this" if tree.returns_unrequested else ""
    _warn(names, f"{path} has state that this load did not request", hint)


def log_options(path: Path, numbers: Iterable[tuple[ParameterGroup, Json]]) -> None:
    """Log parameter group options, such as `fused`, replaced by the checkpoint. Numbers are not options.

    Args:
        numbers: Each group, with its hyperparameters in the checkpoint.
    """
    changes = [
        f"{key}={saved[key]} for {value}"
        for group, saved in numbers
        for key, value in group.numbers.items()
        if key in saved and saved[key] != value and (isinstance(value, _FLAGS) or isinstance(saved[key], _FLAGS))
    ]
    _warn(changes, f"optimizer options were replaced by those in {path}, for bitwise equal results")


def _warn(names: Sequence[str], text: str, hint: str = "") -> None:
    if names:
        _log.warning(f"{text}: {', '.join(dict.fromkeys(names))}{hint}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
