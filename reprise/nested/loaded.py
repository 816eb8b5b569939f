"""The result of a load: its values, and the names missing on either side."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from reprise.errors import ConfigError, count_of
from reprise.nested.stored_names import Keys

_log = logging.getLogger(__name__)

# Which names that only one side has are refused: all, those that the checkpoint lacks, those of modules, none.
Strictness = bool | Literal["missing", "model"]

_MOST_NAMED = 5


def check_strict(strict: object) -> None:
    """Refuse what is no `Strictness`: a text with a slip in it would refuse less than was meant.

    Raises:
        ConfigError: naming it.
    """
    if type(strict) is not bool and strict not in ("missing", "model"):
        expected = 'True, False, "missing" or "model"'
        raise ConfigError("`strict` has no such value", expected=expected, found=repr(strict))


class LoadedState(dict[str, Any]):
    """The values returned by a load, with the names missing on a side, where the load did not refuse them.

    Attributes:
        missing_keys: names requested by this rank and missing in the checkpoint: their values were kept.
        unexpected_keys: names in the checkpoint requested by no rank.
    """

    def __init__(
        self, values: Mapping[str, Any], missing_keys: Sequence[str] = (), unexpected_keys: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


def is_refused(strict: Strictness, keys: Keys, models: Collection[Keys]) -> bool:
    """Return whether a load refuses a name that one side alone has.

    Args:
        models: the keys of modules.
    """
    return strict is not False and (strict != "model" or any(keys[: len(model)] == model for model in models))


def log_names(path: Path, result: LoadedState, *, is_first: bool) -> None:
    """Log the names missing on either side.

    Args:
        is_first: whether this rank logs the lines common to all ranks.
    """
    missing, unexpected = result.missing_keys, result.unexpected_keys
    if unexpected and is_first:
        text = f"{count_of(len(unexpected), 'tensor')} that nothing given has: {_first(unexpected)}"
        _log.warning(f"not loaded from {path}: {text}")
    if missing:
        keep = "keeps its value" if len(missing) == 1 else "keep their values"
        _log.warning(f"not in {path}: {count_of(len(missing), 'name')}, which {keep}: {_first(missing)}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
