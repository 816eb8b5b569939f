"""Reads tensors of a transformers folder, box by box, as float32."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from models import families
from models.config import ModelConfig
from reprise.errors import MismatchError
from reprise.format import Box, Place, in_bytes, whole
from reprise.loading import Gatherer, LoadReport, Target, open_tensor_file
from reprise.storage import Files
from reprise.tensors import LiveTensor
from trainer.data.tokenizer_beside import tokenizer_files_in
from trainer.interop.finite import FiniteCheck
from trainer.interop.floats import ITEMS, read_floats
from trainer.interop.hf.config import differences
from trainer.interop.hf.folder import HfFolder, open_folder, stored_places
from trainer.interop.source import StateSource

_log = logging.getLogger(__name__)


def fill(
    folder: HfFolder,
    places: Mapping[str, Place],
    live: Sequence[LiveTensor],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> LoadReport:
    """Read the bytes of each box of `live`, float32, into its memory; `progress` gets the number of new bytes.

    Raises:
        CheckpointError: if a file cannot be read or ends early, or a number in it is NaN or infinite.
    """
    start = time.perf_counter()
    gatherer = Gatherer()
    read_bytes = filled_bytes = 0
    for tensor in sorted(live, key=lambda t: (places[t.spec.name].file, places[t.spec.name].offset)):
        place, target, check = places[tensor.spec.name], Target(tensor, tensor.box), FiniteCheck()
        with open_tensor_file(folder.files, (folder.path / place.file).resolve()) as file:
            for piece, values in read_floats(file, place, tensor.box, gatherer=gatherer):
                check.add(torch.from_numpy(values))
                part = in_bytes(piece, values.itemsize)
                target.put(part, values.reshape(-1).view(np.uint8).reshape(part.shape))
                filled_bytes += values.nbytes
                progress(values.nbytes)
            read_bytes += file.read_bytes
        where = f"{folder.path / place.file}, {tensor.spec.name}"
        check.require_all(tensor.box, place.spec.view, place.spec.shape, where=where)
        target.finish()
    return LoadReport(len(live), len(live), read_bytes, filled_bytes, time.perf_counter() - start)


def read_whole(folder: HfFolder, place: Place) -> torch.Tensor:
    """Return a tensor as float32, without the padding rows of its vocabulary."""
    return _read(folder, place, whole(place.spec.view)).reshape(place.spec.shape)


def folder_source(path: Path, files: Files, model: ModelConfig | None = None) -> StateSource:
    """Return the weights of a folder as a source, and log the settings of its files that the model does not have.

    Args:
        model: the expected model; by default the folder's own.

    Raises:
        CheckpointError: if it is not such a folder, or is damaged.
        MismatchError: if its model is not supported, or another one.
    """
    folder = open_folder(path, files)
    expected = folder.model if model is None else model
    for line in [*([] if model is None else differences(folder.model, model, where=path)), *folder.lost]:
        _log.warning(line)
    places = stored_places(folder, expected)
    check_tied(folder, expected)
    tokenizer = tokenizer_files_in(path)
    return StateSource(expected, 0, False, lambda name: read_whole(folder, places[name]), tokenizer)


def check_tied(folder: HfFolder, model: ModelConfig) -> None:
    """Refuse a stored output layer with other values than the embedding tied to it.

    Raises:
        MismatchError: if it differs.
    """
    for alias, name in families.aliases(model).items():
        if alias not in folder.places:
            continue
        origin = name if name in folder.places else name.split(".", 1)[1]
        if not _are_same(folder, folder.places[origin], folder.places[alias]):
            raise MismatchError(
                "Parameters are tied, and the folder holds two different ones",
                where=folder.path,
                expected=f"{alias} and {origin} of the same bits",
                fix="Set tie_word_embeddings to false in its config.json, and model.tie_word_embeddings=false.",
            )


def _are_same(folder: HfFolder, first: Place, second: Place) -> bool:
    """Return whether two matrices have the same bits as float32, reading some rows of both at a time."""
    if first.spec.shape != second.spec.shape:
        return False
    height, width = first.spec.shape
    rows = max(1, ITEMS // width)
    for lo in range(0, height, rows):
        box = Box((lo, 0), (min(rows, height - lo), width))
        rows_of_first, rows_of_second = (_read(folder, place, box).view(torch.int32) for place in (first, second))
        if not torch.equal(rows_of_first, rows_of_second):
            return False
    return True


def _read(folder: HfFolder, place: Place, box: Box) -> torch.Tensor:
    memory = torch.empty(box.shape, dtype=torch.float32)
    fill(folder, {place.spec.name: place}, [LiveTensor(place.spec, box, memory, (0,))])
    return memory
