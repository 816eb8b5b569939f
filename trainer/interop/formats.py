"""The interface of a format to convert. `table.py` lists the formats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.errors import CheckpointError, ConfigError, MismatchError, count_of
from reprise.loading import Checkpoint
from reprise.storage import FILE_SYSTEM, Files, shown, step_count
from trainer.config.schema import Config
from trainer.interop.source import StateSource

_log = logging.getLogger(__name__)

_MOST_LISTED, _MOST_NAMED = 20, 10
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Command-line options of an import.

    Args:
        config: configuration of the run to continue; its model is the expected model.
        trusts_pickle: whether files may be unpickled, which can run code.
        weights_only: whether the optimizer's state is left out.
        overrides: the command-line overrides in `config`.
        from_rank0: whether the first copy of a tensor is taken where copies on several ranks differ.
    """

    config: Config
    trusts_pickle: bool = False
    weights_only: bool = False
    overrides: Sequence[str] = ()
    from_rank0: bool = False


@contextmanager
def known_form(program: str, path: Path) -> Iterator[None]:
    """Refuse files whose content is not laid out as a reader expects.

    Raises:
        CheckpointError: in place of the error of the reader.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"A checkpoint of {program} has a form that is not known",
            where=path,
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix=f"It is damaged, or its version of {program} lays it out in another way.",
        ) from error


def require_trust(options: ImportOptions, program: str, *, where: Path) -> None:
    """Refuse files that are pickles unless they are trusted.

    Raises:
        ConfigError: with the option to add.
    """
    if not options.trusts_pickle:
        raise ConfigError(
            f"{program}'s files are pickles",
            where=where,
            fix="If you know who wrote them, add --trust-pickle: no class of theirs is imported and no code is run.",
        )


def listed(problems: Sequence[str], noun: str) -> str:
    """Return the number of problems and the first of them, one a line."""
    more = ["..."] if len(problems) > _MOST_LISTED else []
    return f"{count_of(len(problems), noun)}:\n" + "\n".join(f"  {line}" for line in [*problems[:_MOST_LISTED], *more])


def few(names: Iterable[str]) -> str:
    """Return the first of some names, for a message."""
    return ", ".join(sorted(names)[:_MOST_NAMED]) or "nothing"


def one_step(values: Iterable[object], *, where: object) -> float | None:
    """Return the number of steps that all of `values` are, of which None stands for no number; None if there is none.

    Raises:
        CheckpointError: if there are several, or one makes no sense.
    """
    steps = set[float]()
    for value in values:
        try:
            if value is not None:
                steps.add(step_count(value.item() if isinstance(value, torch.Tensor) else value))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError("A number of steps makes no sense", where=where, found=shown(value)) from error
    if len(steps) > 1:
        raise CheckpointError("The numbers of steps of an optimizer differ", where=where, found=sorted(steps))
    return steps.pop() if steps else None


def log_settings(groups: Iterable[object]) -> None:
    """Log the settings of an optimizer's groups, which are not carried."""
    tables = [group for group in groups if isinstance(group, Mapping)]
    for line in sorted({", ".join(f"{key} {shown(g[key])}" for key in _SETTINGS if key in g) for g in tables}):
        _log.info(f"the optimizer was set to {line}: not carried, the run that continues has its own, optimizer.*")


def require_moments(signs: Sequence[str], options: ImportOptions, *, where: object) -> None:
    """Refuse to import weights alone from a checkpoint saved with moments, unless `weights_only` is set.

    Args:
        signs: evidence of moments at the save; empty if the checkpoint was saved without.

    Raises:
        MismatchError: naming the signs.
    """
    if signs and not options.weights_only:
        raise MismatchError(
            "The optimizer's moments of a checkpoint are not there, and a run would begin again without them",
            where=where,
            expected="the state of Adam",
            found=f"none, beside {' and '.join(signs)}",
            fix="Copy the files that are missing, or take the weights alone with --weights-only.",
        )


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Command-line options of an export.

    Args:
        dtype: dtype of the exported tensors.
        tokenizer: a file or a folder to copy tokenizer files from.
        merge: the weights beneath the adapters of the checkpoint, to add the adapters to; None adds nothing.
        averages: whether the moving averages are written in place of the parameters.
        files: the store to write to.
    """

    dtype: torch.dtype = torch.float32
    tokenizer: Path | None = None
    merge: Path | None = None
    averages: bool = False
    files: Files = FILE_SYSTEM


def require_float32(options: ExportOptions, program: str, *, where: Path) -> None:
    """Refuse another dtype than float32, and a tokenizer, for a format that has neither.

    Raises:
        ConfigError: with what to leave out.
    """
    if options.dtype is not torch.float32 or options.tokenizer is not None:
        raise ConfigError(
            f"A {program} folder is written in float32 and without a tokenizer",
            where=where,
            fix=f"Leave --dtype and --tokenizer out: {program} casts to the dtype of the tensors that it fills.",
        )


@dataclass(frozen=True, slots=True)
class Format:
    """A format of other programs.

    Args:
        summary: a short description.
        read: opens a path for import; its source describes the model, and no override needs to.
        write: writes a checkpoint of ours to a new path; None if the format is import only.
        completes_model: whether it takes what its files leave open from the configured model, so a group `model=NAME`
            need not equal the stored model.
        merges: whether adapters can be merged with their base: `ExportOptions.merge` applies.
        has_averages: whether an export can take the moving averages: `ExportOptions.averages` applies.
        has_copies: whether several ranks may keep copies of a tensor: `ImportOptions.from_rank0` applies.
    """

    summary: str
    read: Callable[[Path, ImportOptions], StateSource]
    write: Callable[[Checkpoint, Path, ExportOptions], None] | None = None
    completes_model: bool = False
    merges: bool = False
    has_averages: bool = False
    has_copies: bool = False
