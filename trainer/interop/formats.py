"""Defines a convertible format's interface. `table.py` lists the formats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reprise.errors import CheckpointError, ConfigError, MismatchError, count_of
from reprise.loading import Checkpoint, no_folder
from reprise.storage import FILE_SYSTEM, Files, finite_number, is_dir, is_file, shown
from trainer.config.schema import Config
from trainer.interop.source import StateSource

_log = logging.getLogger(__name__)

_MOST_LISTED, _MOST_NAMED = 20, 10
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Command-line options for an import.

    Args:
        config: The continued run's configuration. Its model is the expected model.
        trusts_pickle: Whether pickles may be read. Their classes are not imported, and no code in them runs.
        weights_only: Whether to leave out optimizer state.
        overrides: The command-line overrides in `config`.
    """

    config: Config
    trusts_pickle: bool = False
    weights_only: bool = False
    overrides: Sequence[str] = ()


@contextmanager
def _known_form(program: str, where: object) -> Iterator[None]:
    """Refuse files whose content does not have the expected layout.

    Raises:
        CheckpointError: The reader raised an error.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"A checkpoint from {program} cannot be read",
            where=where,
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix=f"It is damaged, or its {program} version uses a different layout.",
        ) from error


def require_trust(options: ImportOptions, program: str, *, where: Path) -> None:
    """Refuse pickles unless they are trusted.

    Raises:
        ConfigError: Pickles are not trusted. The error has the option to add.
    """
    if not options.trusts_pickle:
        raise ConfigError(
            f"{program}'s files are pickles",
            where=where,
            fix="If you trust their author, add --trust-pickle: their classes are not imported and no code is run.",
        )


def listed(problems: Sequence[str], noun: str) -> str:
    """Return the problem count and the first problems, each on its own line."""
    more = ["..."] if len(problems) > _MOST_LISTED else []
    return f"{count_of(len(problems), noun)}:\n" + "\n".join(f"  {line}" for line in [*problems[:_MOST_LISTED], *more])


def few(names: Iterable[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join(sorted(names)[:_MOST_NAMED]) or "nothing"


def common_step(values: Iterable[object]) -> float | None:
    """Return the step count shared by all `values`, ignoring None. Return None if there is no count.

    Raises:
        ValueError: The counts differ, or a count is invalid.
    """
    counts = (value.item() if isinstance(value, torch.Tensor) else value for value in values if value is not None)
    steps = {finite_number(count, least=0) for count in counts}
    if len(steps) > 1:
        raise ValueError(f"an optimizer's step counts differ: {sorted(steps)}")
    return steps.pop() if steps else None


def parameter_groups(optimizer: object) -> list[Mapping[str, Any]]:
    """Return the parameter groups in an optimizer's state, which may be nested."""
    if not isinstance(optimizer, Mapping):
        return []
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        return [group for group in groups if isinstance(group, Mapping)]
    return parameter_groups(optimizer.get("optimizer"))


def steps_of(optimizer: object) -> list[object]:
    """Return the step counts in an optimizer's state, which may be nested."""
    if not isinstance(optimizer, Mapping):
        return []
    state = optimizer.get("state") or {}
    entries = [entry for entry in state.values() if isinstance(entry, Mapping)]
    groups = optimizer.get("param_groups") or ()
    steps = [entry.get("step") for entry in (*groups, *entries)]
    return [*steps, state.get("common_step"), *steps_of(optimizer.get("optimizer"))]


def log_settings(groups: Iterable[object]) -> None:
    """Log the settings of an optimizer's groups, which are not carried over."""
    tables = [group for group in groups if isinstance(group, Mapping)]
    for line in sorted({", ".join(f"{key} {shown(g[key])}" for key in _SETTINGS if key in g) for g in tables}):
        _log.info(f"the optimizer's settings were {line}: not carried over, the continued run has its own, optimizer.*")


def require_moments(signs: Sequence[str], options: ImportOptions, *, where: object) -> None:
    """Refuse to import weights alone from a checkpoint saved with moments, unless `weights_only` is set.

    Args:
        signs: Evidence for saved moments. Empty if the checkpoint was saved without them.

    Raises:
        MismatchError: There is such evidence. The error lists it.
    """
    if signs and not options.weights_only:
        raise MismatchError(
            "The checkpoint's optimizer moments are missing: the run would restart with zero moments",
            where=where,
            expected="Adam's state",
            found=f"none, although the checkpoint has {' and '.join(signs)}",
            fix="Copy the missing files, or import the weights alone with --weights-only.",
        )


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Command-line options for an export. A format has the options that its `Format` names.

    Args:
        dtype: The exported tensors' dtype.
        tokenizer: A file or folder to copy tokenizer files from.
        merge: The base weights to add the checkpoint's adapters to. None adds nothing.
        averages: Whether to write moving averages in place of the parameters.
        files: The store to write to.
    """

    dtype: torch.dtype = torch.float32
    tokenizer: Path | None = None
    merge: Path | None = None
    averages: bool = False
    files: Files = FILE_SYSTEM


@dataclass(frozen=True, slots=True)
class Format:
    """Another program's format.

    Args:
        program: The program's name, for messages.
        summary: A short description.
        open: Opens a path for import. The source describes the model, so no override needs to.
        write: Writes our checkpoint to a new path. None if the format is import only.
        takes_file: Whether a path may be a file.
        completes_model: Whether the configured model fills in whatever the files leave open. If so, a group
            `model=NAME` may differ from the stored model.
        has_dtypes: Whether an export may have another dtype than float32, and a tokenizer.
        merges: Whether an export can merge adapters with their base, or write moving averages.
    """

    program: str
    summary: str
    open: Callable[[Path, ImportOptions], StateSource]
    write: Callable[[Checkpoint, Path, ExportOptions], None] | None = None
    takes_file: bool = False
    completes_model: bool = False
    has_dtypes: bool = False
    merges: bool = False

    def read(self, path: Path, options: ImportOptions) -> StateSource:
        """Open a path for import. Its tensors are read later.

        Raises:
            ConfigError: The files are pickles, which are not trusted.
            CheckpointError: Files are missing or damaged, or have an unknown layout.
            MismatchError: The files hold another model, or a form that is not supported.
        """
        if not is_dir(path) and not (self.takes_file and is_file(path)):
            raise no_folder(path)
        with _known_form(self.program, path):
            source = self.open(path, options)

        def read(name: str) -> torch.Tensor:
            with _known_form(self.program, f"{path}, {name}"):
                return source.read(name)

        return replace(source, read=read)
