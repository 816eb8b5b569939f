"""What a rank finds when it has started: settings of the process itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.harness import DEADLINE_S
from trainer.launch import process_group as launch

_FAULTS = """
import ctypes
import resource
from trainer.launch import process_group as launch

C = ctypes.CDLL(None)
C.malloc.restype, C.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
C.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, see prctl(2): else one fault may bring 2 MiB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sizes = [16 << 20] * 8 + [64 << 20] * 2  # the larger ones are above any threshold of glibc's
    blocks = [C.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(ctypes.c_void_p(block), 1, size)
    for block in reversed(blocks):
        C.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if STARTS:
    launch.keep_freed_memory(launch.start("cpu", deterministic=False, variables={}).device)
print([faults() for _ in range(4)][-1])
"""


def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    """256 MiB, 65,536 pages of 4 KiB, which glibc by itself gives back every time."""
    assert _faults(starts=True) < 100
    assert _faults(starts=False) > 10_000


def _faults(*, starts: bool) -> int:
    command = [sys.executable, "-c", _FAULTS.replace("STARTS", str(starts))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return int(ended.stdout)


_THREADS = """
import json, os, torch
from trainer.launch import process_group as launch
cluster = launch.start("cpu", deterministic=False, threads=FIXED)
print(json.dumps([cluster.threads, torch.get_num_threads(), len(os.sched_getaffinity(0))]))
"""


@pytest.mark.parametrize(("fixed", "text", "threads"), [(0, "3", 3), (0, None, None), (5, "3", 5)])
def test_a_process_computes_with_the_threads_it_is_given(fixed: int, text: str | None, threads: int | None) -> None:
    """Run in a process of its own, because torch reads the variable when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if text is not None:
        environment["OMP_NUM_THREADS"] = text
    ended = subprocess.run(
        [sys.executable, "-c", _THREADS.replace("FIXED", str(fixed))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    recorded, used, cores = json.loads(ended.stdout)
    assert recorded == used == (threads or cores)


@pytest.mark.parametrize(
    ("variables", "ranks", "threads"),
    [
        ({}, 1, 8), ({}, 4, 2), ({}, 16, 1), ({"OMP_NUM_THREADS": "3"}, 4, 3),
        ({"OMP_NUM_THREADS": "1"}, 1, 1), ({"OMP_NUM_THREADS": "1"}, 4, 2),  # as torchrun sets it
        ({"OMP_NUM_THREADS": "4,2"}, 1, 4), ({"OMP_NUM_THREADS": " "}, 1, 8), ({"OMP_NUM_THREADS": "0"}, 1, 8),
        ({"OMP_NUM_THREADS": "-1"}, 1, 8), ({"OMP_NUM_THREADS": "x"}, 4, 2),
        ({"OMP_NUM_THREADS": "99999999999"}, 1, 4096),
    ],
)  # fmt: skip
def test_the_threads_of_a_rank(
    variables: dict[str, str], ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert launch.thread_count(0, variables, ranks) == threads
    assert launch.thread_count(5, variables, ranks) == 5
