"""Power cuts of real file systems lose nothing that was saved. `scripts/faults/soak_power.py` makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults.soak_power import CANNOT_MOUNT

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def soak_power(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return status and output of a short soak, or skip the test with the reason why nothing can be mounted."""
    short = ["12", "--recordings", "1", "--resume-every", "6", "--iterations", "12", "--folder", str(folder)]
    command = [sys.executable, "-m", "scripts.faults.soak_power", *short, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode == CANNOT_MOUNT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert str(folder) not in Path("/proc/mounts").read_text()
    attached = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [file for file in attached if str(folder) in file]
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["ext4-writeback", "ext4-ordered", "xfs", "btrfs"])
def test_power_cuts_lose_nothing_that_was_saved(tmp_path: Path, name: str) -> None:
    status, text = soak_power(tmp_path / "soak", "--on", name)
    assert status == 0, text
    assert f"soak_power: {name}: 12 cuts" in text
    assert "2 resumed, " in text
    assert "none damaged, none lost" in text


def test_a_disk_that_forgets_what_it_flushed_is_found_out(tmp_path: Path) -> None:
    status, text = soak_power(tmp_path / "soak", "--on", "ext4-writeback", "--lies")
    assert status == 1, text
    assert "saved as the job's output says" in text
    assert "are missing" in text
