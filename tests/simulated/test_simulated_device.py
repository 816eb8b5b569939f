"""What holds on a device of streams and pinned memory, shown without one: by a simulated accelerator.

Its tests run in processes of their own, because a process has one accelerator.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import simulated
from tests.harness import TINY, curve, tensor_files
from tests.profiles import nightly
from tests.simulated import __main__ as starter
from tests.simulated import register

pytestmark = pytest.mark.skipif(bool(register.missing_reason()), reason=register.missing_reason() or "has a compiler")
ROOT = Path(simulated.__file__).parents[2]
TRAINER = ("-m", "trainer", "model=gpt2_tiny", *TINY, "schedule.lr_decay_iters=7")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process that has the device."""
    return {**os.environ, **starter.variables(tmp_path_factory.mktemp("device"))}


def ran(arguments: Sequence[str], variables: dict[str, str], timeout_s: float = 120.0) -> str:
    """Run Python and return its output; after `timeout_s`, fail with it, and end all processes of its group."""
    command, streams = [sys.executable, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=variables, cwd=ROOT, text=True, start_new_session=True, **streams) as process:
        try:
            text = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end in {timeout_s} s:\n{process.communicate()[0]}")
    assert process.returncode == 0, text
    return str(text)


# The mutations that came back most often: a step that does not wait for the copies of a save, and a load that does not
# wait for the work on its memory.
GATED = "test_a_save_has_the_bytes_of_its_iteration or test_a_load_waits"


@pytest.mark.parametrize(("chosen", "least"), [(GATED, 3), nightly("test_", 21)], ids=["some", "all"])
def test_the_tests_of_a_device_pass_on_it(tmp_path: Path, variables: dict[str, str], chosen: str, least: int) -> None:
    options = ["-m", "simulated", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "-k", chosen]
    folders = ["tests/cuda/test_saves.py"] if chosen == GATED else ["tests/cuda"]
    text = ran(["-m", "pytest", "-v", *folders, *options], variables, timeout_s=400.0)
    ended = re.search(r"(\d+) passed, \d+ deselected", text)  # and none skipped
    assert ended is not None, text
    assert int(ended[1]) >= least, text


@pytest.mark.slow
def test_a_run_moves_between_its_ranks_and_a_cpu(tmp_path: Path, variables: dict[str, str]) -> None:
    """Each rank has a device of its own. A CPU continues from its state, and saves the same bytes again."""
    folder, cpu = tmp_path / "moved", "train.device=cpu"
    ran([*TRAINER, cpu, f"run.dir={tmp_path / 'cpu'}", "train.train_iters=7"], variables)
    for iterations, command, device in ((3, (), "cpu"), (5, TORCHRUN, "simulated"), (7, (), "cpu")):
        overrides = [f"run.dir={folder}", f"train.train_iters={iterations}", f"train.device={device}"]
        overrides += ["parallel.zero_stage=3", "checkpoint.reshard=true"]
        ran([*command, *TRAINER, *overrides], variables)
    losses = [[float.fromhex(row[1]) for row in curve(path)] for path in (folder, tmp_path / "cpu")]
    assert losses[0][:3] == losses[1][:3]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    saved = folder / "checkpoints/iter_0000005"
    again = [*TRAINER, cpu, f"run.dir={tmp_path / 'again'}", f"checkpoint.load={saved}", "checkpoint.reshard=true"]
    ran([*again, "train.train_iters=5"], variables)
    assert tensor_files(tmp_path / "again/checkpoints/iter_0000005") == tensor_files(saved)
