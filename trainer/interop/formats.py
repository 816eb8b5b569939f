"""The interface of a format that can be converted. `table.py` lists the formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.errors import MismatchError
from reprise.reading import Checkpoint
from trainer.config.schema import Config
from trainer.interop.source import StateSource


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Command-line options of an import.

    Args:
        config: configuration of the run that will continue; its model is the expected one.
        trusts_pickle: whether files may be unpickled, which can run code.
        weights_only: whether the optimizer's state is left out.
        optimizer_names: the optimizer's parameter names in its order, for formats that keep them by number.
        overrides: the command-line overrides that `config` was composed of.
        from_rank0: whether the first copy of a tensor is taken where copies on several ranks differ.
    """

    config: Config
    trusts_pickle: bool = False
    weights_only: bool = False
    optimizer_names: Sequence[str] | None = None
    overrides: Sequence[str] = ()
    from_rank0: bool = False


def require_moments(signs: Sequence[str], asked: ImportOptions, *, where: object) -> None:
    """Refuse to import weights alone from a checkpoint that was saved with moments, unless they alone are wanted.

    Args:
        signs: what says that there were moments; nothing if the checkpoint was saved without.

    Raises:
        MismatchError: naming the signs.
    """
    if signs and not asked.weights_only:
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
    """

    dtype: torch.dtype = torch.float32
    tokenizer: Path | None = None
    merge: Path | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of other programs.

    Args:
        summary: a short description.
        read: opens a path for import; None if the format is export only.
        write: writes a checkpoint of ours to a new path; None if the format is import only.
        names_model: whether the format describes the model, so that no override needs to.
        completes_model: whether it takes what its files leave open from the configured model, so that a group
            `model=NAME` is not what has to be found.
        merges: whether adapters can be merged with their base, so that `ExportOptions.merge` applies.
        numbers_moments: whether moments may be kept by number, so that `ImportOptions.optimizer_names` applies.
        has_copies: whether several ranks may keep copies of a tensor, so that `ImportOptions.from_rank0` applies.
    """

    summary: str
    read: Callable[[Path, ImportOptions], StateSource] | None = None
    write: Callable[[Checkpoint, Path, ExportOptions], None] | None = None
    names_model: bool = False
    completes_model: bool = False
    merges: bool = False
    numbers_moments: bool = False
    has_copies: bool = False
