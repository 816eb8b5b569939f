"""The benchmark of local checkpoints, in a process of its own: it starts a process group."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness import DEADLINE_S


@pytest.mark.nightly
def test_local_saves_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.local", "small", "--rounds", "1"]
    command += ["--local", str(tmp_path), "--shared", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    found = dict(re.findall(r"^(\S.*?)  +(\d+\.\d{4})  ", ended.stdout, re.MULTILINE))
    assert float(found["iteration of 256 tokens with a local save / without"]) > 0
    assert float(found["load, local / shared"]) > 0
    assert found["bytes sent by a copy / bytes of the state"] == "1.0000"
    # Manifests and the blocks of the file system weigh more beside 1.6 MB than beside the states that are measured.
    assert 1 <= float(found["bytes on a host / share * 2 * 3"]) < 1.2
    assert list(tmp_path.iterdir()) == []
