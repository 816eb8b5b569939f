"""Builds the simulated accelerator and registers it with torch, for the whole life of this process.

torch calls a device of another package `PrivateUse1`; https://docs.pytorch.org/tutorials/advanced/privateuseone.html.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "simulated"
DEVICES = 4
TOTAL_BYTES = 2 << 30
_SOURCE = Path(__file__).with_name("device.cpp")
_COMPILER = os.environ.get("CXX", "g++")


def new_stream(device: torch.device | int | None = None, **names: Any) -> torch.Stream:
    """Return a stream of a device, or of the current one."""
    return torch.Stream(torch.device(NAME, _index(device)), **names)


def new_event(enable_timing: bool = False, **_: Any) -> torch.Event:
    """Return an event of the current device that is not recorded yet."""
    return torch.Event(torch.device(NAME, _current()), enable_timing=enable_timing)


def missing_reason() -> str:
    """Return why the device cannot be built here, or an empty text."""
    return "" if shutil.which(_COMPILER) else f"needs a compiler for the simulated device: there is no {_COMPILER}"


def build(folder: Path) -> Path:
    """Compile the library in a folder, unless it is there, and return it.

    Raises:
        subprocess.CalledProcessError: if the compiler fails.
    """
    package = Path(torch.__file__).parent
    include = package / "include"
    library = folder / f"device-{sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # As torch itself is built: without NDEBUG its headers have assertions, one of which is wrong in torch 2.11.
    command = [_COMPILER, "-O1", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w", str(_SOURCE)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{package / 'lib'}"]
    fresh = library.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-lc10", "-ltorch_cpu", "-o", str(fresh)], check=True)
    return fresh.replace(library)


def register(library: Path) -> torch.device:
    """Load the library, and let torch know the device as its accelerator."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.ops.simulated.begin()
    return torch.device(NAME, 0)


def pin(address: int, total_bytes: int) -> None:
    """Let the device copy from and to memory of the host in the background."""
    torch.ops.simulated.pin(address, total_bytes)


def unpin(address: int) -> bool:
    """Return whether the memory was pinned, and pin it no longer."""
    return bool(torch.ops.simulated.unpin(address))


def keep_busy(stream: torch.Stream, seconds: float) -> None:
    """Let what follows on a stream begin later."""
    torch.ops.simulated.sleep(stream.stream_id, stream.device_index, seconds)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let what is put on a stream from now on begin at the end of the block."""
    number = torch.ops.simulated.hold(stream.stream_id, stream.device_index)
    try:
        yield
    finally:
        torch.ops.simulated.let_go(number)


def delay_copies(seconds: float = 0.002) -> None:
    """Let every non-blocking copy between host and device take longer from now on."""
    torch.ops.simulated.delay_copies(seconds)


@contextmanager
def delayed_copies(seconds: float) -> Iterator[None]:
    """Let those that begin in the block take this much longer."""
    delay_copies(seconds)
    try:
        yield
    finally:
        delay_copies()


def synchronize() -> None:
    """Wait for all devices."""
    for index in range(DEVICES):
        torch.accelerator.synchronize(index)


def host_waits() -> int:
    """Return how often the host of this process has waited: for a number, a size, a copy, an event or a stream."""
    return int(torch.ops.simulated.host_waits())


def _current() -> int:
    return torch.accelerator.current_device_index()


def _index(device: Any) -> int:
    index = torch.device(NAME, device).index if isinstance(device, int) else getattr(device, "index", None)
    return _current() if index is None else index


def _module() -> ModuleType:
    """Return the module that `torch.get_device_module` finds, with the names that all accelerators have."""
    module = ModuleType(f"torch.{NAME}")

    @contextmanager
    def stream(chosen: torch.Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = torch.accelerator.current_stream(chosen.device)
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    module.__dict__.update(
        Stream=new_stream,
        Event=new_event,
        stream=stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,  # without it torch 2.11 takes the device for one never used, and does not wait for it
        _is_in_bad_fork=lambda: False,
        manual_seed_all=torch.default_generator.manual_seed,
        default_generators=[torch.default_generator] * DEVICES,  # whose kernels these are
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        device_count=lambda: DEVICES,
        current_device=_current,
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        get_device_name=lambda device=None: "Simulated",
        get_device_properties=lambda device=None: SimpleNamespace(name="Simulated", total_memory=TOTAL_BYTES),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return module
