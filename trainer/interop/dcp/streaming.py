"""Writes a torch.distributed.checkpoint folder. Only a single file's tensors are in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from tqdm import tqdm

from reprise.errors import CheckpointError, TrainerError
from reprise.storage import Files

_FILE_BYTES = 256 << 20


class StreamingPlanner(DefaultSavePlanner):
    """Supplies a key's real value only when torch's writer reaches it.

    Args:
        read: Returns the value at an index. None if the state itself contains the value.
    """

    def __init__(self, read: Callable[[MetadataIndex], Any], *, flatten_state_dict: bool = True) -> None:
        super().__init__(flatten_state_dict=flatten_state_dict)
        self._read = read
        self.progress: Callable[[int], object] = lambda count: None

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value to write at an index."""
        value = self._read(index)
        if value is None:
            return super().lookup_object(index)
        if isinstance(value, torch.Tensor):
            self.progress(value.nbytes)
        return value


class _Writer(FileSystemWriter):
    """Writes several files in sequence: torch holds a file's tensors in memory until it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix, results = plan.storage_data, list[WriteResult]()
        for number, items in enumerate(_bundles(plan.items)):
            part = replace(plan, items=items, storage_data=replace(prefix, prefix=f"{prefix.prefix}{number}_"))
            results += super().write_data(part, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _bundles(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield the other items, then bundles of tensors up to `_FILE_BYTES`. A larger tensor is bundled alone."""
    yield [item for item in items if item.tensor_data is None]
    bundle, bundle_bytes = list[WriteItem](), 0
    for item in items:
        if item.tensor_data is None:
            continue
        item_bytes = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if bundle and bundle_bytes + item_bytes > _FILE_BYTES:
            yield bundle
            bundle, bundle_bytes = [], 0
        bundle.append(item)
        bundle_bytes += item_bytes
    if bundle:
        yield bundle


def write_folder(folder: Path, state: dict[str, Any], planner: StreamingPlanner, *, total_bytes: int) -> None:
    """Write `state` to an existing folder, with a progress bar on a terminal.

    Args:
        state: The state dict for `dcp.save`. Tensors read by `planner` are on `meta`.

    Raises:
        CheckpointError: torch's writer fails.
        OSError: The file system fails.
    """
    with (
        tqdm(total=total_bytes, desc=folder.name, unit="B", unit_scale=True, disable=None, leave=False) as bar,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner.progress = bar.update
        try:
            save(state, storage_writer=_Writer(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            failed, _ = next(iter(error.failures.values()))
            raise _reason(failed, folder) from None


def sync_folder(files: Files, folder: Path) -> None:
    """Sync every file: torch syncs its metadata file before flushing its last buffer."""
    for path in sorted(folder.iterdir()):
        descriptor = files.open_for_reading(path)
        try:
            files.sync(descriptor)
        finally:
            files.close(descriptor)


def _reason(failed: BaseException, folder: Path) -> BaseException:
    """Return the root cause. On a full disk torch only reports an unexpected file position."""
    reason: BaseException | None = failed
    while reason is not None and not isinstance(reason, OSError | TrainerError):
        reason = reason.__cause__ or reason.__context__
    message = f"{type(failed).__name__}: {failed}"
    return reason or CheckpointError("Writing failed", where=folder, found=message, fix="Nothing was written.")
