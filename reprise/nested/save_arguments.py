"""Checks a call's arguments, raising errors shared with other ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.layout import MOST_ELEMENTS
from reprise.ranks.group import check_seconds
from reprise.saving.policy import SavePolicy
from reprise.storage.folder import iteration_name, require_vacant
from reprise.storage.paths import is_url


def target_folder(folder: str | Path) -> Path:
    """Return the absolute path for a folder to save to.

    Raises:
        ConfigError: `folder` is a URL, or neither a str nor a Path.
    """
    require_path(folder)
    if is_url(str(folder)):
        raise ConfigError("A checkpoint folder is a URL; only mounted file systems can be written", found=folder)
    return Path(folder).absolute()


def check_iteration(iteration: int) -> None:
    """Refuse an invalid iteration number.

    Raises:
        CheckpointError: It is not an int, is negative, or is too large.
    """
    if not _is_int(iteration, 0) or iteration > MOST_ELEMENTS:
        raise CheckpointError("The iteration is invalid", expected="an int of 0 or more", found=repr(iteration))


def check_options(policy: SavePolicy, from_rank0: object) -> None:
    """Refuse save options with invalid types or values.

    A string as `from_rank0`, for instance, would be split into letters.

    Raises:
        ConfigError: Names the first invalid option.
    """
    is_list = isinstance(from_rank0, Sequence | Set) and not isinstance(from_rank0, str | bytes)
    are_texts = is_list and all(isinstance(part, str) for part in from_rank0)  # type: ignore[attr-defined]
    require("from_rank0", are_texts, 'texts in a list, such as ["*.running_*"]', from_rank0)
    keep, staging_bytes = policy.retention.max_checkpoint_keep, policy.staging_bytes
    require("max_checkpoint_keep", _is_int(keep, 0), "an int of 0 or more; 0 keeps all", keep)
    require("file_bytes", _is_int(policy.file_bytes, 1), "an int of 1 or more", policy.file_bytes)
    is_size = staging_bytes is None or _is_int(staging_bytes, 0)
    require("staging_bytes", is_size, "None, or an int of 0 or more", staging_bytes)
    for name in ("stall_timeout_s", "commit_timeout_s"):
        check_seconds(name, getattr(policy, name))


def require(name: str, is_valid: bool, expected: str, value: object) -> None:
    """Refuse an invalid argument.

    Raises:
        ConfigError: Names the argument, and shows its value.
    """
    if not is_valid:
        raise ConfigError(f"{name} is invalid", expected=expected, found=repr(value))


def _is_int(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def check_vacant(folder: Path, iteration: int) -> None:
    """Refuse an iteration already in the folder.

    Raises:
        CheckpointError: The iteration exists.
    """
    require_vacant(
        folder / iteration_name(iteration),
        "Save another iteration, or pass overwrite=True, which keeps the existing folder as `.superseded-k`.",
    )


def require_path(path: object) -> None:
    """Refuse anything but a path, with an error shared with other ranks.

    Raises:
        ConfigError: `path` is neither a str nor a Path.
    """
    require("The path", isinstance(path, (str, Path)), "a str or a pathlib.Path", path)
