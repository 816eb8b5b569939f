"""The interface of a format to convert. `table.py` lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.files import FILE_SYSTEM, Files
from reprise.reading import Checkpoint
from trainer.config.schema import Config
from trainer.interop.source import StateSource


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Command-line options of an import.

    Args:
        config: configuration of the run to continue; its model is the expected model.
        trusts_pickle: whether files may be unpickled, which can run code.
        weights_only: whether the optimizer's state is left out.
        overrides: the command-line overrides in `config`.
        from_rank0: whether the first copy of a tensor is taken where copies on several ranks differ.
        files: the store of the files to read.
    """

    config: Config
    trusts_pickle: bool = False
    weights_only: bool = False
    overrides: Sequence[str] = ()
    from_rank0: bool = False
    files: Files = FILE_SYSTEM


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


@dataclass(frozen=True, slots=True)
class Format:
    """A format of other programs.

    Args:
        summary: a short description.
        read: opens a path for import; None if the format is export only.
        write: writes a checkpoint of ours to a new path; None if the format is import only.
        names_model: whether the format describes the model, and no override needs to.
        completes_model: whether it takes what its files leave open from the configured model, so a group `model=NAME`
            need not equal the stored model.
        merges: whether adapters can be merged with their base: `ExportOptions.merge` applies.
        has_averages: whether an export can take the moving averages: `ExportOptions.averages` applies.
        has_copies: whether several ranks may keep copies of a tensor: `ImportOptions.from_rank0` applies.
    """

    summary: str
    read: Callable[[Path, ImportOptions], StateSource] | None = None
    write: Callable[[Checkpoint, Path, ExportOptions], None] | None = None
    names_model: bool = False
    completes_model: bool = False
    merges: bool = False
    has_averages: bool = False
    has_copies: bool = False
