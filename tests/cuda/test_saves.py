"""Saves of a state on a device: the bytes of its iteration, equal to a CPU's, and memory that runs out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from reprise import AsyncSaver, load, save
from reprise.commit.replicas import ReplicaDigests, checksum
from reprise.errors import CheckpointError
from reprise.format import STATE
from reprise.nested.documents import document
from reprise.nested.tree import tree_of
from reprise.ranks import single_rank_channel
from reprise.saving import Checkpointer, Retention, SavePolicy, checkpointer
from reprise.saving.snapshot import Snapshot
from reprise.storage import Files
from reprise.tensors import Contents, Grid, bytes_of, live_tensors, map_memory
from reprise.tensors.memory import Arena, _copy_stream, pin
from tests.cuda.devices import SIMULATED
from tests.fakes import Axis, Sharding, open_when_awaited, sample_specs, sample_state
from tests.harness import tensor_files
from tests.simulated import register

# A device copies 1.2 GB in some 25 ms, and steps over it in 2: a step that did not wait would overtake the copy.
WIDTHS = {"cpu": 64, "simulated": 64, "cuda": 7168}


class Net(nn.Module):
    """Two layers, and a buffer that every forward pass changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, width] for [batch, width], and count the call."""
        self.count += 1
        found: torch.Tensor = self.layers(x)
        return found


class Training:
    """A model in training on a device, with values that do not depend on it."""

    def __init__(self, device: torch.device, width: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.net = Net(width)
        for parameter in self.net.parameters():
            parameter.data.normal_(generator=generator)
        self.net.to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True)
        self._batch = torch.randn(4, width, generator=generator).to(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self._batch).square().mean().backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Return a copy of every tensor on the host."""
        state = {
            f"{key}.{number}": value
            for number, values in enumerate(self.optimizer.state.values())
            for key, value in values.items()
        }
        return {name: value.detach().cpu().clone() for name, value in [*self.net.state_dict().items(), *state.items()]}

    def to(self, device: torch.device) -> Training:
        """Return the same state on another device."""
        moved = Training(device, self.net.count.numel())
        moved.net.load_state_dict(self.net.state_dict())
        moved.optimizer.load_state_dict(self.optimizer.state_dict())
        return moved


class TrainersSaver:
    """The trainer's background saves, which hold back the optimizer's step, by the calls of `AsyncSaver`."""

    def __init__(self, folder: Path, *, files: Files | None = None, max_checkpoint_keep: int = 0) -> None:
        policy = SavePolicy(folder, retention=Retention(max_checkpoint_keep), async_save=True, stall_timeout_s=30.0)
        self._checkpointer = Checkpointer(policy, single_rank_channel(), nonce="n", files=files)
        self._checkpointer.start()

    def __enter__(self) -> TrainersSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        live = tuple(live_tensors(model, optimizer, grid=Grid.flat(1)))
        state = document(tree_of(model, optimizer).section(), iteration)
        specs = tuple(tensor.spec for tensor in live)
        self._checkpointer.save(iteration, Contents(specs, live, {}, {STATE: state}, (optimizer,)))

    @property
    def is_saving(self) -> bool:
        return self._checkpointer.is_saving

    def wait(self) -> None:
        self._checkpointer.wait()
        for report in self._checkpointer.reports():
            if report.error is not None:
                raise report.error


Saver = type[AsyncSaver] | type[TrainersSaver]
savers = pytest.mark.parametrize("saver_class", [AsyncSaver, TrainersSaver])


class SlowDisk(Files):
    """A disk on which no write ends before it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        assert self.released.wait(120.0)
        super().write(descriptor, data, offset=offset)


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def assert_saved(folder: Path, training: Training, expected: dict[str, torch.Tensor]) -> None:
    """Hold the newest checkpoint to values of a training."""
    found = Training(training.net.count.device, training.net.count.numel())
    load(folder, found.net, found.optimizer)
    assert differing(found.values(), expected) == []


def _keep_busy(stream: torch.Stream | None) -> None:
    """Let what follows on a stream begin a while later, so that whoever does not wait is too early."""
    if stream is None:  # a CPU has none
        return
    if stream.device.type == SIMULATED:
        register.keep_busy(stream, 0.3)
    else:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call] # cycles of some 2 GHz


def _held(stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
    """Let what follows on a stream begin at the end of the block; on CUDA, only as `_keep_busy` does."""
    return register.held(stream) if stream is not None and stream.device.type == SIMULATED else contextlib.nullcontext()


@contextlib.contextmanager
def _slow_copies(device: torch.device, seconds: float) -> Iterator[None]:
    """Let copies between host and device that begin in the block take longer; on CUDA, the first one begin later."""
    if device.type == SIMULATED:
        with register.delayed_copies(seconds):
            yield
        return
    _keep_busy(None if device.type == "cpu" else torch.accelerator.current_stream(device))
    yield


def _copying(training: Training) -> torch.Stream | None:
    """Return the stream on which saves copy."""
    device = training.net.count.device  # with its number, by which streams are told apart
    return None if device.type == "cpu" else _copy_stream(device)


def save_during_steps(
    saver_class: Saver, folder: Path, training: Training, device: torch.device, disk: SlowDisk, *, waits: bool
) -> list[str]:
    """Save while three steps follow; return the names of tensors whose saved bytes are not of the iteration saved.

    Args:
        waits: whether the steps wait for the copies, so that these are not held until after the steps.
    """
    training.step()
    with saver_class(folder, files=disk, max_checkpoint_keep=1) as saver:
        for iteration in (1, 2):  # the second has its memory from the first
            disk.released.clear()
            expected = training.values()
            with contextlib.nullcontext() if waits else _held(_copying(training)):
                _keep_busy(_copying(training))
                saver.save(iteration, training.net, training.optimizer)
                assert saver.is_saving
                for _ in range(3):
                    training.step()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            assert differing(training.values(), expected)
            disk.released.set()
            saver.wait()
    found = Training(device, training.net.count.numel())
    load(folder, found.net, found.optimizer)
    return differing(found.values(), expected)


@savers
def test_a_save_has_the_bytes_of_its_iteration(
    tmp_path: Path, saver_class: Saver, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, disk = Training(device, WIDTHS[device.type]), SlowDisk()
    open_when_awaited(monkeypatch, disk.released)
    assert save_during_steps(saver_class, tmp_path / "saves", training, device, disk, waits=True) == []


@savers
def test_without_the_wait_for_its_copies_it_has_others(
    tmp_path: Path, saver_class: Saver, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that shows that the test above can fail: neither a step nor a call waits for the copies."""
    monkeypatch.setattr(Snapshot, "release", lambda self: None)
    if device.type == "cpu":
        monkeypatch.setattr(Snapshot, "_stage_ahead", lambda self, **_: None)
    training = Training(device, WIDTHS[device.type])
    # A device copies in order, so that the first tensors may be copied in time, and the moments are not.
    assert save_during_steps(saver_class, tmp_path / "saves", training, device, SlowDisk(), waits=False)


def test_a_save_has_what_the_device_has_yet_to_write(tmp_path: Path, device: torch.device) -> None:
    """The host is ahead of the device: the update that a save follows may not have begun."""
    training = Training(device, 128)
    training.step()
    with AsyncSaver(tmp_path / "saves") as saver:
        _keep_busy(None if device.type == "cpu" else torch.accelerator.current_stream(device))
        for parameter in training.net.parameters():
            parameter.data.add_(1.0)
        saver.save(1, training.net, training.optimizer)
        expected = training.values()
        training.step()
    assert_saved(tmp_path / "saves", training, expected)


def refuse(total_bytes: int, *, is_pinned: bool) -> Arena:
    """Stand for a host that has no memory left that could be pinned."""
    if total_bytes:
        raise CheckpointError("The staging memory cannot be pinned", found=f"CUDA error 2 for {total_bytes} B")
    return Arena(0, is_pinned=False)


@pytest.mark.parametrize("staging_bytes", [0, 100_000, None])
def test_with_little_staging_memory_a_call_waits(
    tmp_path: Path,
    device: torch.device,
    staging_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A save takes longer, and has the same bytes."""
    if staging_bytes is None:
        monkeypatch.setattr(checkpointer, "Arena", refuse)
    training = Training(device, 128)
    training.step()
    with AsyncSaver(tmp_path / "saves", staging_bytes=staging_bytes) as saver:
        expected = training.values()
        _keep_busy(_copying(training))
        saver.save(1, training.net, training.optimizer)
        for _ in range(3):
            training.step()
    assert ("cannot be pinned, found CUDA error 2" in caplog.text) == (staging_bytes is None)
    assert_saved(tmp_path / "saves", training, expected)


def test_one_state_has_one_file_on_every_device(tmp_path: Path, device: torch.device) -> None:
    """A state made on the CPU goes to the device and back, saved and loaded at every stop."""
    here = Training(torch.device("cpu"), 96)
    for _ in range(3):
        here.step()
    save(tmp_path / "cpu", here.net, here.optimizer, iteration=3)
    there = here.to(device)
    save(tmp_path / "device", there.net, there.optimizer, iteration=3)
    loaded = Training(device, 96)
    load(tmp_path / "cpu", loaded.net, loaded.optimizer)
    with AsyncSaver(tmp_path / "loaded") as saver:
        saver.save(3, loaded.net, loaded.optimizer)
    back = Training(torch.device("cpu"), 96)
    load(tmp_path / "loaded", back.net, back.optimizer)
    assert differing(back.values(), here.values()) == []
    expected = tensor_files(tmp_path / "cpu" / "iter_0000003")
    assert expected
    for name in ("device", "loaded"):
        assert tensor_files(tmp_path / name / "iter_0000003") == expected


def test_a_load_waits_for_the_work_on_its_memory(tmp_path: Path, device: torch.device) -> None:
    """The threads of a load do not copy on the caller's stream, which may still write there, or read at once."""
    training = Training(device, 128)
    training.step()
    save(tmp_path / "saves", training.net, training.optimizer, iteration=1)
    expected = training.values()
    own = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
    with contextlib.nullcontext() if own is None else torch.get_device_module(device).stream(own):
        _keep_busy(own)
        for parameter in training.net.parameters():
            parameter.data.fill_(torch.nan)
        with _slow_copies(device, 0.05):
            load(tmp_path / "saves", training.net, training.optimizer)
        assert differing(training.values(), expected) == []


def test_checksums_of_replicas_are_of_the_iteration(device: torch.device) -> None:
    """A device adds them up in the order of its stream, before the next step changes what it adds."""
    specs = sample_specs()
    sharding, state = Sharding("2 replicas", (Axis("replica", 2),)), sample_state(specs, seed=3)
    host = sharding.live(1, specs, state)
    live = [replace(each, local=each.local.to(device, copy=True)) for each in host]
    expected = ReplicaDigests(host).digests()
    if device.type != "cpu":
        images = {each.spec.name: bytes_of(each.local) for each in host if each.local.numel()}
        expected = {name: int(checksum(image)) for name, image in images.items()}
    with _slow_copies(device, 0.3):
        digests = ReplicaDigests(live)
    for each in live:
        each.local.zero_()
    assert digests.digests() == expected


def test_a_save_that_finds_no_device_memory_fails_alone(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer changes in every forward pass, so a save copies it at once: there is no memory for that."""
    training = Training(device, WIDTHS[device.type])
    training.step()
    with TrainersSaver(tmp_path / "saves") as saver:
        saver.save(1, training.net, training.optimizer)
        saver.wait()
        with monkeypatch.context() as patch:
            _exhaust(device, patch)
            saver.save(2, training.net, training.optimizer)
        training.step()
        with pytest.raises(CheckpointError, match="ran out of device memory"):
            saver.wait()
        expected = training.values()
        saver.save(3, training.net, training.optimizer)
        training.step()
    assert sorted(path.name for path in (tmp_path / "saves").glob("iter_*")) == ["iter_0000001", "iter_0000003"]
    assert_saved(tmp_path / "saves", training, expected)


def _exhaust(device: torch.device, patch: pytest.MonkeyPatch) -> None:
    def clone(*_: object, **__: object) -> torch.Tensor:
        if device.type != "cpu":  # torch's own error of its own allocator
            return torch.empty(1 << 50, dtype=torch.uint8, device=device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")

    patch.setattr(torch.Tensor, "clone", clone)


@pytest.mark.cuda
def test_memory_that_cannot_be_pinned_leaves_no_error_behind() -> None:
    """A failed call of the runtime is raised by the next launch of a kernel, unless it is cleared."""
    memory = map_memory(1 << 20)
    pin(memory)
    try:
        with pytest.raises(CheckpointError, match=r"cannot be pinned.*CUDA error"):
            pin(memory)  # a second time
        assert float(torch.ones(1000, device="cuda").sum()) == 1000.0
        torch.cuda.synchronize()
    finally:
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


@pytest.mark.cuda
def test_copies_into_the_arena_do_not_block_the_host() -> None:
    """torch copies from a device in the background only into memory that it knows to be pinned."""
    arena = Arena(1 << 30, is_pinned=True)
    memory = arena.take(1 << 30, offset=0)
    assert memory is not None
    source = torch.randint(256, (1 << 30,), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles of the device, 0.1 s
        torch.from_numpy(memory).copy_(source, non_blocking=True)
        event = stream.record_event()
    assert not event.query()
    event.synchronize()
    assert np.array_equal(memory, source.cpu().numpy())
    arena.close()
