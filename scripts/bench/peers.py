"""The alternatives in the benchmark: torch.save, safetensors' own writer and torch's distributed checkpoints.

This is the only module of the project that uses torch.save and torch.load, which pickle, and only for files that it has
just written. Every alternative saves the same tensors and ends with files and folder synced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from scripts.bench.probe import Loop, PeakMemory, sync_all, sync_folder
from scripts.bench.subject import Subject
from scripts.bench.ways import MEASURED_SAVE, Saved, Way, blocking

_START_S = 300  # for the process of torch_checkpointing, which takes more than its own 30 s beside other programs
_REASONS = (CheckpointException, RuntimeError, AssertionError, OSError)


def peer_ways(subject: Subject) -> Mapping[str, Way]:
    """Return the alternative ways of saving and loading a subject."""
    load_dcp = functools.partial(_load_dcp, subject)
    in_thread = functools.partial(_start_dcp, subject, AsyncCheckpointerType.THREAD)
    in_process = functools.partial(_start_dcp, subject, AsyncCheckpointerType.PROCESS)
    return {
        "torch.save": Way(blocking(functools.partial(_save_torch, subject)), functools.partial(_load_torch, subject)),
        "safetensors save_file": Way(
            blocking(functools.partial(_save_safetensors, subject)), functools.partial(_load_safetensors, subject)
        ),
        "DCP save": Way(blocking(functools.partial(_save_dcp, subject)), load_dcp, may_raise=_REASONS),
        "DCP async_save, thread": Way(_beside(in_thread), load_dcp, may_raise=_REASONS),
        "DCP async_save, process": Way(_beside(in_process), load_dcp, may_raise=_REASONS),
        "torch_checkpointing": Way(
            functools.partial(_save_torch_checkpointing, subject),
            functools.partial(_load_torch_checkpointing, subject),
            may_raise=(*_REASONS, ModuleNotFoundError),
        ),
    }


def _save_torch(subject: Subject, folder: Path) -> None:
    torch.save(subject.named(), folder / "state.pt")
    sync_all(folder)


def _load_torch(subject: Subject, folder: Path) -> None:
    _copy(torch.load(folder / "state.pt", weights_only=True), subject)


def _save_safetensors(subject: Subject, folder: Path) -> None:
    safetensors.torch.save_file(subject.named(), folder / "state.safetensors")
    sync_all(folder)


def _load_safetensors(subject: Subject, folder: Path) -> None:
    _copy(safetensors.torch.load_file(folder / "state.safetensors"), subject)


def _copy(tensors: Mapping[str, torch.Tensor], subject: Subject) -> None:
    for name, tensor in subject.named().items():
        tensor.copy_(tensors[name])


def _save_dcp(subject: Subject, folder: Path) -> None:
    state_dict_saver.save(subject.named(), checkpoint_id=folder, no_dist=True)  # syncs its files itself
    sync_folder(folder)


def _load_dcp(subject: Subject, folder: Path) -> None:
    state_dict_loader.load(subject.named(), checkpoint_id=folder, no_dist=True)


def _start_dcp(subject: Subject, kind: AsyncCheckpointerType, folder: Path) -> Future[Any]:
    if kind is AsyncCheckpointerType.PROCESS and not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    started = state_dict_saver.async_save(
        subject.named(),
        checkpoint_id=folder,
        async_checkpointer_type=kind,
        no_dist=kind is AsyncCheckpointerType.THREAD,
    )
    assert isinstance(started, Future)
    return started


def _beside(begin: Callable[[Path], Future[Any]]) -> Callable[[Path, Loop], Saved]:
    """Return the save that `begin` starts and that runs beside a loop."""

    def save(folder: Path, loop: Loop) -> Saved:
        loop.learn()
        ends: list[float] = []

        def end(future: Future[Any]) -> None:
            if future.exception() is None:
                sync_folder(folder)
            ends.append(time.perf_counter())

        peak = PeakMemory()
        start = time.perf_counter()
        future = begin(folder)
        future.add_done_callback(end)
        blocked_s = time.perf_counter() - start
        slowed_s = loop.run_until(lambda: bool(ends))
        future.result()
        return Saved(ends[0] - start, blocked_s, slowed_s, peak.grown_bytes())

    return save


@contextlib.contextmanager
def _manager() -> Iterator[Any]:
    """Give a manager of torch_checkpointing, which is optional here. Its O_DIRECT fails on ext4 and is off."""
    package = importlib.import_module("torch_checkpointing")
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    config = package.CheckpointManager.Config(storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False))
    config.save.process_config.subprocess_init_timeout_secs = _START_S
    with contextlib.closing(package.CheckpointManager(config)) as manager:
        yield manager


def _save_torch_checkpointing(subject: Subject, folder: Path, loop: Loop) -> Saved:
    """Save and return the cost of the last save, with a step right after it under the manager's lock."""
    peak = PeakMemory()
    with _manager() as manager:
        for _ in range(1, MEASURED_SAVE):
            manager.save(str(folder / "earlier"), {"state": subject.named()}).result()
            shutil.rmtree(folder / "earlier")
        os.sync()
        loop.learn()
        start = time.perf_counter()
        future = manager.save(str(folder / "state"), {"state": subject.named()})
        with manager.lock():
            subject.step()
        blocked_s = time.perf_counter() - start
        slowed_s = loop.run_until(future.done)
        future.result()
        sync_all(folder / "state")
        return Saved(time.perf_counter() - start, blocked_s, slowed_s, peak.grown_bytes())


def _load_torch_checkpointing(subject: Subject, folder: Path) -> None:
    with _manager() as manager:
        _copy(manager.load(str(folder / "state"), into={"state": subject.named()})["state"], subject)


def leave() -> None:
    """Destroy the one-rank process group that saving in a process needs."""
    if dist.is_initialized():
        dist.destroy_process_group()
