"""Checks of the arguments of a save, by errors which a rank shares with the others."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.layout import MOST_ELEMENTS
from reprise.ranks.group import check_seconds
from reprise.storage.folder import iteration_name
from reprise.storage.paths import exists, is_url


def target_folder(folder: str | Path) -> Path:
    """Return the absolute path of a folder to save to.

    Raises:
        ConfigError: `folder` is a URL, or no path.
    """
    require_path(folder)
    if is_url(str(folder)):
        raise ConfigError("A checkpoint folder is a URL; only mounted file systems can be written", found=folder)
    return Path(folder).absolute()


def check_iteration(iteration: int) -> None:
    """Refuse an iteration outside the names of folders.

    Raises:
        CheckpointError: naming it.
    """
    if type(iteration) is not int or not 0 <= iteration <= MOST_ELEMENTS:
        raise CheckpointError("The iteration is invalid", expected="an int of 0 or more", found=repr(iteration))


def check_patterns(from_rank0: object) -> None:
    """Refuse patterns other than a sequence of texts; a single text would be taken letter by letter.

    Raises:
        ConfigError: naming the given type.
    """
    mistakes: list[object] = [from_rank0]
    if isinstance(from_rank0, Sequence | Set) and not isinstance(from_rank0, str | bytes):
        mistakes = [part for part in from_rank0 if not isinstance(part, str)]
    if mistakes:
        raise ConfigError(
            "from_rank0 is invalid",
            expected='texts in a list, such as ["*.running_*"]',
            found=repr(mistakes[0]),
        )


def check_numbers(*, max_checkpoint_keep: object, file_bytes: object) -> None:
    """Refuse invalid numbers of checkpoints and bytes.

    Raises:
        ConfigError: naming the first.
    """
    if type(max_checkpoint_keep) is not int or max_checkpoint_keep < 0:
        raise ConfigError(
            "max_checkpoint_keep is invalid",
            expected="an int of 0 or more; 0 keeps all",
            found=repr(max_checkpoint_keep),
        )
    if type(file_bytes) is not int or file_bytes < 1:
        raise ConfigError("file_bytes is invalid", expected="an int of 1 or more", found=repr(file_bytes))


def check_limits(*, staging_bytes: object, **seconds: object) -> None:
    """Refuse limits of a background save other than numbers of bytes or seconds.

    Args:
        seconds: limits by their names, each a finite number of seconds above 0.

    Raises:
        ConfigError: naming the first.
    """
    if staging_bytes is not None and (type(staging_bytes) is not int or staging_bytes < 0):
        raise ConfigError(
            "staging_bytes is invalid", expected="None, or an int of 0 or more", found=repr(staging_bytes)
        )
    for name, limit in seconds.items():
        check_seconds(name, limit)


def check_vacant(folder: Path, iteration: int) -> None:
    """Refuse an existing iteration of the folder.

    Raises:
        CheckpointError: naming its path.
    """
    path = folder / iteration_name(iteration)
    if exists(path):
        fix = "Save another iteration, or with overwrite=True, which keeps this one as `.superseded-k`."
        raise CheckpointError("The iteration is there already", where=path, fix=fix)


def require_path(path: object) -> None:
    """Refuse anything but a path, by an error which a rank shares with the others.

    Raises:
        ConfigError: naming its type.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError("The path is invalid", expected="a str or a pathlib.Path", found=type(path).__name__)
