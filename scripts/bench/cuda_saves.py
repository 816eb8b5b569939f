"""Saves of a training state on a device while it trains, and loads into its memory, against torch's and a bare copy."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from reprise.channel import single_rank_channel
from reprise.reading import LoadSource
from reprise.savers import Checkpointer, Restorer, Retention, SavePolicy
from scripts.bench.cuda_group import Device, Figures, MeasuredSide, Setting, build_training, step_of
from scripts.bench.peers import leave
from scripts.bench.probe import PeakMemory, sync_folder
from scripts.bench.subject import Subject
from scripts.bench.ways import proven
from trainer.launch.process_group import Cluster

COPY, OURS, THREAD, PROCESS = "pinned copy", "reprise", "DCP async_save, thread", "DCP async_save, process"
LOAD, LOAD_FILE = "reprise, load", "safetensors load_file"
_COPIES, _LOADS = 3, 3


@dataclass(slots=True)
class Saving:
    """A state in training, made when it is first asked for, and the folder of the group."""

    setting: Setting
    cluster: Cluster
    folder: Path
    device: Device
    _made: tuple[Subject, Callable[[], object], float] | None = None

    def training(self) -> tuple[Subject, Callable[[], object], float]:
        """Return the state, its iteration, and the seconds of an iteration with no save beside it."""
        if self._made is None:
            subject = build_training(self.setting, self.cluster)
            self._made = subject, step_of(subject, self.setting), 0.0
            for _ in range(3):
                self._made[1]()
        subject, step, _ = self._made
        seconds = [self.seconds_of(step) for _ in range(5)]
        self._made = subject, step, statistics.median(seconds)
        return self._made

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call and of its work on the device."""
        self.device.synchronize()
        start = time.perf_counter()
        call()
        self.device.synchronize()
        return time.perf_counter() - start


def save_sides(setting: Setting, cluster: Cluster, folder: Path) -> Mapping[str, MeasuredSide]:
    """Return the sides in their order: the files of our save are those that are loaded, and go afterwards."""
    saving = Saving(setting, cluster, folder, Device(cluster.device))
    return {
        COPY: MeasuredSide(partial(_copy, saving), 30),
        OURS: MeasuredSide(partial(_ours, saving), 45),
        LOAD: MeasuredSide(partial(_load, saving), 15),
        LOAD_FILE: MeasuredSide(partial(_load_file, saving), 15),
        THREAD: MeasuredSide(partial(_dcp, saving, AsyncCheckpointerType.THREAD), 60),
        PROCESS: MeasuredSide(partial(_dcp, saving, AsyncCheckpointerType.PROCESS), 75),
    }


def _copy(saving: Saving) -> Figures:
    """Copy the whole state into pinned memory; the median of some times."""
    subject, _, quiet_s = saving.training()
    sources = [tensor.local.detach() for tensor in subject.tensors()]
    is_pinned = saving.device.is_accelerator
    targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=is_pinned) for s in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)

    seconds = statistics.median(saving.seconds_of(copy) for _ in range(_COPIES))
    return {"stall_s": seconds, "state_bytes": float(subject.own_bytes), "step_s": quiet_s}


@dataclass(frozen=True, slots=True)
class Begun:
    """A save under way: `hold` lets the optimizer's step begin, `settle` returns when it is durable."""

    hold: Callable[[], None]
    settle: Callable[[], None]


def _cost(saving: Saving, begin: Callable[[int], Begun]) -> Figures:
    """Measure two saves, of which the first allocates what the second uses, with the steps that follow."""
    subject, step, quiet_s = saving.training()
    following, figures = saving.setting.following, Figures()
    (optimizer,) = subject.optimizers()
    for number in (1, 2):
        peak, begun = _peak_memory(), list[Begun]()
        handle = optimizer.register_step_pre_hook(lambda *_, begun=begun: begun[0].hold())
        saving.device.synchronize()
        saving.device.reset_peak()
        try:
            start = time.perf_counter()
            begun.append(begin(number))
            returned_s = time.perf_counter() - start
            step()
            saving.device.synchronize()
            first_s = time.perf_counter() - start
            for _ in range(following - 1):
                step()
            saving.device.synchronize()
            total_s = time.perf_counter() - start
            begun[0].settle()
            durable_s = time.perf_counter() - start
        finally:
            handle.remove()
        prefix = "first_" if number == 1 else ""
        figures |= {
            f"{prefix}stall_s": first_s - quiet_s,
            f"{prefix}cost_s": total_s - following * quiet_s,
            f"{prefix}durable_s": durable_s,
            f"{prefix}call_s": returned_s,
        }
        if peak is not None:
            figures["host_peak_bytes"] = max(figures.get("host_peak_bytes", 0.0), float(peak.grown_bytes()))
        figures["device_peak_bytes"] = saving.device.peak_bytes()
    return {**figures, "step_s": quiet_s}


def _peak_memory() -> PeakMemory | None:
    """Return a measurement of the host's memory, or None on a kernel that has none, such as gVisor's."""
    try:
        return PeakMemory()
    except OSError:
        return None


def _ours(saving: Saving) -> Figures:
    policy = SavePolicy(saving.folder / "ours", retention=Retention(1), async_save=True, commit_timeout_s=300.0)
    checkpointer = Checkpointer(policy, single_rank_channel(), nonce="bench")
    checkpointer.start()
    subject, _, _ = saving.training()

    def begin(number: int) -> Begun:
        checkpointer.save(number, subject.contents(number))
        return Begun(lambda: None, checkpointer.wait)

    try:
        figures = _cost(saving, begin)
        for report in checkpointer.reports():
            proven(report)
    finally:
        checkpointer.close()
    return figures


def _dcp(saving: Saving, kind: AsyncCheckpointerType) -> Figures:
    """Measure DCP with its own fastest staging: pinned memory, in the background where there is a device."""
    shutil.rmtree(saving.folder / "ours", ignore_errors=True)  # the disk may be small
    subject, _, _ = saving.training()
    is_process, is_on = kind is AsyncCheckpointerType.PROCESS, saving.device.is_accelerator
    if is_process:
        _require_shared_memory(subject.own_bytes)
    if is_process and not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    options = StagingOptions(
        use_pinned_memory=is_on, use_shared_memory=is_process, use_async_staging=is_on, use_non_blocking_copy=is_on
    )
    stager = DefaultStager(options)
    state_stager = stager._state_dict_stager
    close = state_stager.close
    # torch 2.11 closes it after every save, and fails in the next one; torch 2.13 keeps it, with its pinned memory.
    state_stager.close = lambda: None  # type: ignore[method-assign]

    def begin(number: int) -> Begun:
        path = saving.folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        response = state_dict_saver.async_save(
            subject.named(),
            checkpoint_id=path,
            async_checkpointer_type=kind,
            async_stager=stager,
            no_dist=not is_process,
        )
        staged, completion = _futures(response)

        def settle() -> None:
            completion.result()
            sync_folder(path)

        return Begun(lambda: None if staged is None else staged.result(), settle)

    try:
        return _cost(saving, begin)
    finally:
        stager.close()
        close()  # type: ignore[no-untyped-call]
        shutil.rmtree(saving.folder / "dcp", ignore_errors=True)
        if is_process:
            leave()


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


def _futures(response: Any) -> tuple[Future[Any] | None, Future[Any]]:
    """Return the ends of staging, if that is in the background, and of writing."""
    if isinstance(response, AsyncSaveResponse):
        return response.staging_completion, response.upload_completion
    assert isinstance(response, Future)
    return None, response


def _load(saving: Saving) -> Figures:
    """Load our checkpoint into the state, every digest checked; the least of some times, from the page cache."""
    subject, _, _ = saving.training()
    restorer = Restorer(single_rank_channel(), nonce="bench")
    source = LoadSource(saving.folder / "ours")
    live = [*subject.tensors()]

    def load() -> None:
        restorer.restore(source, check=lambda checkpoint: None, live=lambda checkpoint: live, is_new=True)

    seconds = min(saving.seconds_of(load) for _ in range(_LOADS))
    return {"load_s": seconds, "state_bytes": float(subject.own_bytes)}


def _load_file(saving: Saving) -> Figures:
    """Load the same files with safetensors alone, which checks no digest and makes new tensors."""
    paths = sorted((saving.folder / "ours").rglob("*.safetensors"))
    assert paths, "our save has left no files"
    device = str(saving.cluster.device)
    total = 0

    def load() -> None:
        nonlocal total
        loads = [safetensors.torch.load_file(path, device=device) for path in paths]
        total = sum(tensor.nbytes for tensors in loads for tensor in tensors.values())

    seconds = min(saving.seconds_of(load) for _ in range(_LOADS))
    return {"load_s": seconds, "state_bytes": float(total)}
