"""DeepSpeed's extension is compiled before any deadline starts, and a killed build does not stop the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S
from tests.interop.deepspeed_build import COMMAND, FOLDER, built_extensions

# Builds as torch does: it takes `lock`, then waits for its standard input to end, then leaves what was built.
BUILD = """
import os, sys, time
from torch.utils.file_baton import FileBaton
folder = os.environ["TORCH_EXTENSIONS_DIR"] + "/op"
os.makedirs(folder, exist_ok=True)
baton = FileBaton(folder + "/lock")
if not baton.try_acquire():
    sys.exit("somebody builds")
print("building", flush=True)
sys.stdin.read()
open(folder + "/op.so", "a").write("built\\n")
baton.release()
"""
SESSION = f"""
import sys
from pathlib import Path
from tests.interop.deepspeed_build import built_extensions
with built_extensions(Path(sys.argv[1]), [sys.executable, "-c", {BUILD!r}]):
    print("built", flush=True)
    sys.stdin.readline()
"""


def session(folder: Path) -> subprocess.Popen[str]:
    """Start a process that builds into `folder`, in a process group of its own."""
    command = [sys.executable, "-c", SESSION, str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=Path.cwd()
    )


def test_a_killed_build_does_not_block_the_next_one(tmp_path: Path) -> None:
    killed = session(tmp_path)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    assert (tmp_path / "op/lock").exists()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert (tmp_path / "op/lock").exists()
    with session(tmp_path) as other:
        out, _ = other.communicate("", timeout=DEADLINE_S)
    assert (other.returncode, out) == (0, "building\nbuilt\n")
    assert (tmp_path / "op/op.so").read_text() == "built\n"
    assert not (tmp_path / "op/lock").exists()


def test_two_sessions_do_not_build_at_once(tmp_path: Path) -> None:
    with session(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        with session(tmp_path) as second:
            assert second.stdin is not None
            second.stdin.close()  # it would build at once, and fail on the first one's `lock`
            first.communicate("", timeout=DEADLINE_S)
            second.wait(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode) == (0, 0)
    assert (tmp_path / "op/op.so").read_text() == "built\nbuilt\n"


def test_a_failed_build_is_reported_and_leaves_the_user_s_folder(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError), built_extensions(tmp_path, [sys.executable, "-c", "exit(3)"]):
        raise AssertionError("not reached")
    assert FOLDER.is_relative_to(sys.prefix)
    assert "build_shm_op" in COMMAND[-1]
