"""Ways of saving and loading a training state: raw I/O, ours, and those of others.

This is the only module of the project that uses torch.save and torch.load, which pickle, and only for files that it has
just written. Every way saves the same tensors and ends with files and folder synced.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from reprise import AsyncSaver, load_state_dict
from reprise.loading import LoadSource, Restorer
from reprise.saving import Checkpointer, Retention, SavePolicy
from reprise.storage import FILE_SYSTEM
from scripts.bench.probe import sync_all
from scripts.bench.subject import Subject

RAW, DIRECT, COPY = "raw write + fsync", "raw write, O_DIRECT", "one copy of the state"
INLINE, BACKGROUND, AT_ONCE, LIBRARY = "ours, inline", "ours, background", "ours, step at once", "ours, AsyncSaver"
THREAD, PROCESS = "DCP async_save, thread", "DCP async_save, process"
_DIRECT_BYTES = 8 << 20  # in one call
_NONCES = count()  # no two savers of a run have one nonce
_START_S = 300  # for the process of torch_checkpointing, which takes more than its own 30 s beside other programs


def _nothing() -> None:
    """Return: a save that is over has nothing left to do."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A save under way.

    Args:
        is_over: whether its bytes are written.
        settle: returns when all is durable.
        hold: returns when the next step may change the tensors.
    """

    is_over: Callable[[], bool] = lambda: True
    settle: Callable[[], None] = _nothing
    hold: Callable[[], object] = _nothing


Begin = Callable[[int], Begun]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of saving a state into a folder, save after save, and of loading the last one.

    Args:
        opened: yields what begins a save of a number.
        load: loads the save of a number.
        fills: whether `load` fills the state, or only reads what was written.
        steps_at_once: whether the optimizer's next step comes at once after the call of a save.
    """

    opened: Callable[[Subject, Path], AbstractContextManager[Begin]]
    load: Callable[[Subject, Path, int], object]
    fills: bool = True
    steps_at_once: bool = False


def _blocking(write: Callable[[Subject, Path], object]) -> Callable[[Subject, Path], AbstractContextManager[Begin]]:
    """Return the way of `write`, which returns when all in a folder is durable."""

    @contextmanager
    def opened(subject: Subject, folder: Path) -> Iterator[Begin]:
        def begin(number: int) -> Begun:
            (folder / str(number)).mkdir(exist_ok=True)
            write(subject, folder / str(number))
            return Begun()

        yield begin

    return opened


@functools.cache
def _raw_memory(subject: Subject) -> memoryview:
    """Return memory for a rank's share of the state, which begins with a page, and whose pages are there."""
    size = subject.total_bytes // subject.cluster.world_size
    memory = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def _write_raw(flags: int, subject: Subject, folder: Path) -> None:
    """Write a rank's share of the state's bytes to a file."""
    data = _raw_memory(subject)
    descriptor = os.open(folder / f"raw{subject.cluster.rank}", os.O_WRONLY | os.O_CREAT | flags)
    try:
        os.posix_fallocate(descriptor, 0, data.nbytes)
        for at in range(0, data.nbytes, _DIRECT_BYTES):
            os.pwrite(descriptor, data[at : at + _DIRECT_BYTES], at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    FILE_SYSTEM.sync_folder(folder)


def _read_raw(subject: Subject, folder: Path, number: int) -> None:
    """Read a rank's file."""
    memory = _raw_memory(subject)
    with (folder / str(number) / f"raw{subject.cluster.rank}").open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            memory = memory[count:]


@contextmanager
def opened_checkpointer(subject: Subject, folder: Path, *, async_save: bool = True, keep: int = 0) -> Iterator[Begin]:
    """Yield what begins a save of the engine, as the trainer has it; it keeps so many checkpoints, or all for 0."""
    cluster = subject.cluster
    policy = SavePolicy(folder, retention=Retention(keep), async_save=async_save, commit_timeout_s=300.0)
    saver = Checkpointer(policy, cluster.channel, nonce=f"save-{next(_NONCES)}", local_ranks=cluster.local_ranks)
    saver.start()

    def begin(number: int) -> Begun:
        report = saver.save(number, subject.contents(number))
        if report is not None and report.error is not None:
            raise report.error
        return Begun(lambda: not saver.is_saving, settle)

    def settle() -> None:
        saver.wait()
        for report in saver.reports():
            if report.error is not None:
                raise report.error

    try:
        yield begin
    finally:
        saver.close()


def _load_ours(subject: Subject, folder: Path, _: int) -> None:
    """Load the newest checkpoint of a folder, checking every digest."""
    live = list(subject.state.shards())
    restorer = Restorer(subject.cluster.channel, nonce=f"load-{next(_NONCES)}")
    restorer.restore(LoadSource(folder), check=lambda _: None, live=lambda _: live, is_new=True)


@contextmanager
def _opened_library(subject: Subject, folder: Path) -> Iterator[Begin]:
    with AsyncSaver(folder) as saver:

        def begin(number: int) -> Begun:
            saver.save_state_dict(number, {"state": subject.named()})
            return Begun(lambda: not saver.is_saving, saver.wait)

        yield begin


def _load_library(subject: Subject, folder: Path, _: int) -> None:
    load_state_dict(folder, {"state": subject.named()})


def _save_torch(subject: Subject, folder: Path) -> None:
    torch.save(subject.named(), folder / "state.pt")
    sync_all(folder)


def _load_torch(subject: Subject, folder: Path, number: int) -> None:
    _copy(torch.load(folder / str(number) / "state.pt", weights_only=True), subject)


def _save_safetensors(subject: Subject, folder: Path) -> None:
    safetensors.torch.save_file(subject.named(), folder / "state.safetensors")
    sync_all(folder)


def _load_safetensors(subject: Subject, folder: Path, number: int) -> None:
    _copy(safetensors.torch.load_file(folder / str(number) / "state.safetensors"), subject)


def _copy(tensors: Mapping[str, torch.Tensor], subject: Subject) -> None:
    for name, tensor in subject.named().items():
        tensor.copy_(tensors[name])


def _save_dcp(subject: Subject, folder: Path) -> None:
    state_dict_saver.save(subject.named(), checkpoint_id=folder, no_dist=True)  # syncs its files itself
    FILE_SYSTEM.sync_folder(folder)


def _load_dcp(subject: Subject, folder: Path, number: int) -> None:
    state_dict_loader.load(subject.named(), checkpoint_id=folder / str(number), no_dist=True)


@contextmanager
def _opened_dcp(kind: AsyncCheckpointerType, subject: Subject, folder: Path) -> Iterator[Begin]:
    """Yield what begins a save of DCP with its own fastest staging: pinned memory, in the background on a device."""
    is_process, is_on = kind is AsyncCheckpointerType.PROCESS, subject.cluster.device.type != "cpu"
    if is_process:
        _require_shared_memory(subject.own_bytes)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    options = StagingOptions(
        use_pinned_memory=is_on, use_shared_memory=is_process, use_async_staging=is_on, use_non_blocking_copy=is_on
    )
    stager = DefaultStager(options)
    close = stager._state_dict_stager.close
    # torch 2.11 closes it after every save, and fails in the next one; torch 2.13 keeps it, with its pinned memory.
    stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def begin(number: int) -> Begun:
        path = folder / str(number)
        response: Any = state_dict_saver.async_save(
            subject.named(),
            checkpoint_id=path,
            async_checkpointer_type=kind,
            async_stager=stager,
            no_dist=not is_process,
        )
        is_staged = isinstance(response, AsyncSaveResponse)
        ending: Future[Any] = response.upload_completion if is_staged else response
        hold = response.staging_completion.result if is_staged else _nothing
        return Begun(ending.done, functools.partial(_end, ending, path), hold)

    try:
        yield begin
    finally:
        stager.close()
        close()  # type: ignore[no-untyped-call]
        if is_process:
            dist.destroy_process_group()


def _end(ending: Future[Any], path: Path) -> None:
    ending.result()
    sync_all(path)


def _require_shared_memory(total_bytes: int, *, folder: Path = Path("/dev/shm")) -> None:
    """Allow this process, and those that it starts, a file for each tensor of the state in shared memory.

    Raises:
        MemoryError: if shared memory does not hold the state.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    free = shutil.disk_usage(folder).free
    if free < total_bytes:
        raise MemoryError(f"{folder} has {free / 1e9:.1f} GB free, the state takes {total_bytes / 1e9:.1f} GB")


def _manager() -> Any:
    """Return a manager of torch_checkpointing, which is optional here. Its O_DIRECT fails on ext4 and is off."""
    package = importlib.import_module("torch_checkpointing")
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    config = package.CheckpointManager.Config(storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False))
    config.save.process_config.subprocess_init_timeout_secs = _START_S
    return closing(package.CheckpointManager(config))


@contextmanager
def _opened_torch_checkpointing(subject: Subject, folder: Path) -> Iterator[Begin]:
    with _manager() as manager:

        def begin(number: int) -> Begun:
            path = folder / str(number)
            future = manager.save(str(path), {"state": subject.named()})
            return Begun(future.done, functools.partial(_end, future, path), hold)

        def hold() -> None:
            with manager.lock():
                pass

        yield begin


def _load_torch_checkpointing(subject: Subject, folder: Path, number: int) -> None:
    with _manager() as manager:
        _copy(manager.load(str(folder / str(number)), into={"state": subject.named()})["state"], subject)


WAYS: Mapping[str, Way] = {
    RAW: Way(_blocking(functools.partial(_write_raw, 0)), _read_raw, fills=False),
    DIRECT: Way(_blocking(functools.partial(_write_raw, os.O_DIRECT)), _read_raw, fills=False),
    INLINE: Way(functools.partial(opened_checkpointer, async_save=False), _load_ours),
    BACKGROUND: Way(opened_checkpointer, _load_ours),
    AT_ONCE: Way(opened_checkpointer, _load_ours, steps_at_once=True),
    LIBRARY: Way(_opened_library, _load_library, steps_at_once=True),
    "torch.save": Way(_blocking(_save_torch), _load_torch),
    "safetensors save_file": Way(_blocking(_save_safetensors), _load_safetensors),
    "DCP save": Way(_blocking(_save_dcp), _load_dcp),
    THREAD: Way(functools.partial(_opened_dcp, AsyncCheckpointerType.THREAD), _load_dcp, steps_at_once=True),
    PROCESS: Way(functools.partial(_opened_dcp, AsyncCheckpointerType.PROCESS), _load_dcp, steps_at_once=True),
    "torch_checkpointing": Way(_opened_torch_checkpointing, _load_torch_checkpointing, steps_at_once=True),
}
