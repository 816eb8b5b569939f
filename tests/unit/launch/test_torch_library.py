"""Torch's library is loaded before torch is imported, which finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.harness import DEADLINE_S

_LOAD = """
import sys, threading
from pathlib import Path
from trainer.launch.torch_library import load_torch_library

def libraries():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "libtorch_cpu" in line}

assert not libraries()
load_torch_library()
for thread in threading.enumerate()[1:]:  # none if it has loaded the library already
    thread.join()
before = libraries()
assert before and "torch" not in sys.modules

import torch

assert libraries() == before and float(torch.ones(3).sum()) == 3.0
"""
_IS_FOR_ACCELERATORS = any(Path(torch.__file__).parent.glob("lib/libc10_*.so"))


@pytest.mark.skipif(_IS_FOR_ACCELERATORS, reason="torch loads the libraries of accelerators itself")
def test_torch_finds_its_library_loaded() -> None:
    subprocess.run([sys.executable, "-c", _LOAD], cwd=ROOT, timeout=DEADLINE_S, check=True)


_WITHOUT = """
import importlib.util, threading
import trainer.launch.torch_library as library

library.find_spec = lambda name: None
library.load_torch_library()
assert threading.active_count() == 1
"""


def test_a_build_without_the_library_is_left_alone() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT], cwd=ROOT, timeout=DEADLINE_S, check=True)
