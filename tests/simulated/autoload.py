"""What torch calls at its import in a process that `tests.simulated` has started: the device is there from then on.

The product pins memory for it as for CUDA.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

LIBRARY = "SIMULATED_DEVICE"  # the environment variable that names the library


class Runtime:
    """The part of CUDA's runtime that pins memory."""

    @staticmethod
    def cudaHostRegister(address: int, total_bytes: int, _: int) -> int:
        from tests.simulated import register

        register.pin(address, total_bytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        from tests.simulated import register

        return 0 if register.unpin(address) else 1


def begin() -> None:
    """Register the device, with its collectives."""
    from tests.simulated import collectives, register

    register.register(Path(os.environ[LIBRARY]))
    register.delay_copies()
    collectives.register_collectives()
    atexit.register(register.synchronize)  # no stream works while the process is taken down

    from reprise.tensors import memory

    memory._cudart = lambda: Runtime
    memory.PINNING.add(register.NAME)
