"""What a format that can be converted is. Each is told in a module of its own; `table.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint.loading.reader import Checkpoint
from trainer.config.schema import Config
from trainer.interop.source import StateSource


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a command line says of an import besides the path of what is read.

    Args:
        config: of the run that is to go on, as its overrides make it; its model is the one that is expected.
        trusts_pickle: whether files may be unpickled, which can run code.
        weights_only: whether the optimizer's state is left out.
        optimizer_names: the names of the optimizer's parameters in its order, where the format keeps them by number.
    """

    config: Config
    trusts_pickle: bool = False
    weights_only: bool = False
    optimizer_names: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a command line says of an export besides the paths.

    Args:
        dtype: of the tensors that are written.
        tokenizer: a file or a folder to copy tokenizer files from.
    """

    dtype: torch.dtype = torch.float32
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of other programs.

    Args:
        summary: what it is, in a few words.
        read: opens what lies at a path; None where nothing is imported.
        write: writes a checkpoint of ours to a path where nothing is yet; None where nothing is exported.
        names_model: whether what lies there says which model it is, so that no override needs to.
        numbers_moments: whether moments may lie there by number, so that `ImportOptions.optimizer_names` is of use.
    """

    summary: str
    read: Callable[[Path, ImportOptions], StateSource] | None = None
    write: Callable[[Checkpoint, Path, ExportOptions], None] | None = None
    names_model: bool = False
    numbers_moments: bool = False
