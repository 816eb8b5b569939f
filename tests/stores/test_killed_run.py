"""A run and its uploader, killed at random: the store is whole at every moment, and complete at the end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from reprise.storage import CheckpointFolder, Files, iteration_name
from scripts.faults.run_files import TEMPORARY, contents_of
from scripts.faults.soak_kill import MODEL
from tests.crash.hosts import run_trainer
from tests.harness import DEADLINE_S, Running, launch, started
from tests.profiles import SEED
from tests.stores.saving import committed

KILLS = int(os.environ.get("REPRISE_KILLS", "500"))
ITERATIONS = 240
LONGEST_S = 4.0  # of a pause between two kills


class Scene:
    """A run with a mirror, started again after its end."""

    def __init__(self, folder: Path) -> None:
        self.run, self.store, self.root = folder / "run", folder / "store", folder / "run" / "checkpoints"
        self._words = [f"run.dir={self.run}", *MODEL, f"train.train_iters={ITERATIONS}"]
        self._words += ["checkpoint.max_checkpoint_keep=2", f"checkpoint.mirror=file://{self.store}"]
        self._words += ["checkpoint.mirror_wait_s=60"]
        self.stack = contextlib.ExitStack()
        self._running: Running | None = None

    def start(self) -> bool:
        """Start the run if it does not run; return whether it has come to its end."""
        if self._running is not None:
            status = self._running.processes[0].exitcode
            if status is None:
                return False
            assert status in (0, -signal.SIGKILL), self._running.ended().text
            if status == 0:
                return True
            self.stack.close()
        folder = self.run.with_name("run.logs")
        self._running = self.stack.enter_context(started(run_trainer, self._words, folder=folder, ranks=1))
        return False

    def kill(self, victim: str, after_s: float) -> bool:
        """Kill a process after a pause, or the end of the run; return whether it was alive."""
        assert self._running is not None
        process = self._running.processes[0]
        process.join(after_s)
        number = uploader_of(process.pid or 0) if victim == "uploader" else process.pid
        if number is None or process.exitcode is not None:
            return False
        if victim == "run" and not CheckpointFolder(self.root, Files()).committed():
            return False  # the next start would refuse to begin anew
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        if victim == "run":
            process.join(DEADLINE_S)
        return True


def uploader_of(parent: int) -> int | None:
    """Return the process that uploads for a run, if it has been started."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) == parent and b"reprise.stores.child" in (path / "cmdline").read_bytes():
                return int(path.name)
    return None


@pytest.mark.nightly
def test_run_and_uploader_are_killed_at_random_moments(tmp_path: Path) -> None:
    draw, kills, number = random.Random(SEED), Counter[str](), 0
    unbroken = tmp_path / "unbroken" / "run"
    assert launch(unbroken, [*MODEL, f"train.train_iters={ITERATIONS}"]).ok
    while kills.total() < KILLS:
        number += 1
        scene = Scene(tmp_path / f"round{number}")
        with scene.stack:
            while not scene.start():
                victim = draw.choice(("run", "uploader"))
                kills[victim] += scene.kill(victim, draw.uniform(0.0, LONGEST_S))
                print(f"seed {SEED}: {dict(kills)} kills in run {number}", flush=True)
                assert_equal(scene.store, unbroken / "checkpoints")
        command = "-m", "reprise", "checkpoint", "mirror", scene.root, f"file://{scene.store}", "--once"
        subprocess.run([sys.executable, *command], timeout=DEADLINE_S)  # as the run says, if it ends early
        check_end(scene, unbroken / "checkpoints")


def assert_equal(store: Path, unbroken: Path) -> None:
    """Require that each checkpoint that a reader of the store sees is whole, and that of the unbroken run."""
    for name in committed(store):
        with contextlib.suppress(FileNotFoundError):  # taken back meanwhile
            stored = {n: data for n, data in contents_of(store / name).items() if not n.startswith(".upload-")}
            assert stored == contents_of(unbroken / name), name


def check_end(scene: Scene, unbroken: Path) -> None:
    """Require that nothing is lost, at the end of a run."""
    assert committed(scene.store) == [iteration_name(n) for n in range(3, ITERATIONS + 1, 3)]
    assert_equal(scene.store, unbroken)
    assert not [path for path in scene.root.rglob("*") if path.name.endswith(TEMPORARY)]
    assert not list(scene.store.rglob(".upload-*"))
