"""Finds the configuration in the checkpoint to load, and checks its digest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import TrainerError, UnreadableError
from reprise.format import MANIFEST
from reprise.loading import Checkpoint, LoadSource, open_checkpoint, read_file
from reprise.storage import (
    CheckpointFolder,
    Files,
    Json,
    exists,
    failed_read,
    is_file,
    is_iteration_name,
    json_file,
    with_retries,
)
from reprise.stores import files_of, is_stored, location
from trainer.config.checkpoint import Allowed, CheckpointSection
from trainer.config.saved import RUN_CONFIG, model_values, saved_values
from trainer.config.schema import Config
from trainer.data.text import BYTES, TOKENIZER
from trainer.data.tokenizer_beside import TOKENIZER_FILES, tokenizer_files_in, with_tokenizer
from trainer.interop.hf.config import CONFIG, is_folder, read_folder_model


@dataclass(frozen=True, slots=True)
class SavedConfig:
    """A checkpoint's configuration: its file, and its values by dotted key."""

    path: Path
    values: dict[str, object]

    def is_of(self, save: str | None) -> bool:
        """Return whether it belongs to a checkpoint below `save`."""
        return save is not None and Path(save).resolve() in self.path.resolve().parents


def find_saved(load: Path, *, iteration: int | None, save: Path | None, files: Files) -> SavedConfig | None:
    """Find the configuration in the checkpoint at `load`. None if it is not Reprise's, or lacks a configuration.

    A transformers folder has only a model. In a run, the newest readable checkpoint is taken. If `load` is gone, the
    run's own newest checkpoint is taken, since the run started from `load`.

    Args:
        load: `checkpoint.load`, a path.
        iteration: `checkpoint.ckpt_step`.
        save: `checkpoint.save`.

    Raises:
        TrainerError: A path cannot be read, an exactly named checkpoint is damaged, or its configuration is invalid.
    """
    with _reading(load):
        if not is_stored(load) and is_folder(load):
            model, _ = read_folder_model(load)
            return SavedConfig(load / CONFIG, model_values(model))
        checkpoint = _open(load if save is None or _exists(load, save, files) else save, iteration, files)
        if checkpoint is None or not (document := config_document(checkpoint)):
            return None
        path = checkpoint.path / RUN_CONFIG
        values = saved_values(document, checkpoint.state, where=path)
        return SavedConfig(path, _with_tokenizer(values, checkpoint))


def config_document(checkpoint: Checkpoint) -> Json:
    """Return a checkpoint's configuration file. Empty if it has none."""
    if RUN_CONFIG not in checkpoint.manifest.files:
        return {}
    return json_file.parse(read_file(checkpoint, RUN_CONFIG), where=checkpoint.path / RUN_CONFIG)


def tokenizer_of_weights(config: Config, files: Files) -> str | None:
    """Return `data.tokenizer`, or the weights' tokenizer in a run whose texts may have a different one.

    The weights are the run's own newest checkpoint, or else its base, or the weights to load.

    Raises:
        DataError: The weights have a tokenizer in another form, or it cannot be read.
        TrainerError: A checkpoint is damaged, or a path cannot be read.
    """
    section = config.checkpoint
    if section.finetune or section.base is not None or Allowed.data in section.allowed:
        for weights in filter(None, (section.save, section.base, section.load)):
            if weights not in ("auto", "none") and (beside := _tokenizer_files(location(weights), section, files)):
                return with_tokenizer(config.data, beside)
    return config.data.tokenizer


def _tokenizer_files(weights: Path, section: CheckpointSection, files: Files) -> dict[str, Path]:
    with _reading(weights):
        checkpoint = _open(weights, section.ckpt_step, files)
        if checkpoint is None:
            return {} if is_stored(weights) else tokenizer_files_in(weights)
        return {
            name: checkpoint.accessory(name) or checkpoint.path / name
            for name in TOKENIZER_FILES
            if name in checkpoint.manifest.files
        }


def _with_tokenizer(values: dict[str, object], checkpoint: Checkpoint) -> dict[str, object]:
    """Return the values with the checkpoint's own tokenizer, which has the same tokens, if the run's is gone."""
    tokenizer = values.get("data.tokenizer")
    if tokenizer in (None, BYTES) or os.path.exists(Path(str(tokenizer)).expanduser()):
        return values
    path = checkpoint.accessory(TOKENIZER)
    return values if path is None else {**values, "data.tokenizer": str(path.absolute())}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name a path in the error for a failed read, and end the store's process, if any."""
    try:
        yield
    except OSError as error:
        raise failed_read("A path cannot be read", error, where=path, fix="Correct checkpoint.load.") from error
    finally:
        files_of(path).end()


def _exists(load: Path, save: Path, files: Files) -> bool:
    """Return whether there is a path to load. False for an unreachable store if the run has its own checkpoints."""
    try:
        return exists(load)
    except OSError:
        if is_stored(load) and CheckpointFolder(save, files).committed():
            return False
        raise


def _open(load: Path, iteration: int | None, own_files: Files) -> Checkpoint | None:
    files = with_retries(files_of(load, own_files))
    path = LoadSource.named(load).path
    if is_file(path / MANIFEST) or is_iteration_name(path.name):
        return open_checkpoint(path, files, may_lack=True)
    folder = CheckpointFolder(path, files)
    numbers = [number for number in reversed(folder.committed()) if iteration in (None, number)]
    return next(readable(folder, numbers), None)


def readable(folder: CheckpointFolder, iterations: Iterable[int]) -> Iterator[Checkpoint]:
    """Yield a folder's checkpoints of these iterations, without the damaged ones, on which a load reports.

    Raises:
        UnreadableError: A checkpoint cannot be read at the moment.
    """
    for iteration in iterations:
        try:
            yield open_checkpoint(folder.iteration(iteration), folder.files, may_lack=True)
        except UnreadableError:
            raise
        except TrainerError:
            continue
