"""What a rank finds when it has started: settings of the process itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FAULTS = """
import resource
import torch
from trainer import launch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(4 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if START:
    launch.start("cpu", deterministic=False, variables={})
print([faults() for _ in range(8)][-1])
"""


def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    """256 MiB, 65,536 pages of 4 KiB, which glibc by itself gives back at the end of every step."""
    assert _faults(start=True) < 100
    assert _faults(start=False) > 10_000


def _faults(*, start: bool) -> int:
    command = [sys.executable, "-c", _FAULTS.replace("START", str(start))]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return int(ended.stdout)
