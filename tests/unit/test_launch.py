"""What a rank finds when it has started: settings of the process itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FAULTS = """
import ctypes
import resource
from trainer import launch

C = ctypes.CDLL(None)
C.malloc.restype, C.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
C.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, see prctl(2): else one fault may bring 2 MiB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [C.malloc(16 << 20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(ctypes.c_void_p(block), 1, 16 << 20)
    for block in reversed(blocks):
        C.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if STARTS:
    launch.start("cpu", deterministic=False, variables={})
print([faults() for _ in range(4)][-1])
"""


def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    """256 MiB, 65,536 pages of 4 KiB, which glibc by itself gives back every time."""
    assert _faults(starts=True) < 100
    assert _faults(starts=False) > 10_000


def _faults(*, starts: bool) -> int:
    command = [sys.executable, "-c", _FAULTS.replace("STARTS", str(starts))]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return int(ended.stdout)
