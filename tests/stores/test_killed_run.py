"""A run, its uploader and its follower, killed at random: the store, the run and the record of the follower agree."""

from __future__ import annotations

import contextlib
import json
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
from trainer.commands import follow

KILLS = int(os.environ.get("REPRISE_KILLS", "500"))
ITERATIONS = 240
LONGEST_S = 4.0  # of a pause between two kills
LOOK = 'ls "$1"/*.safetensors "$1"/manifest.json > "$2"'  # fails for a folder that is not whole


def run_follower(arguments: list[str]) -> None:
    raise SystemExit(follow.main(arguments))


class Scene:
    """A run with a mirror and a follower, each started again after its end."""

    def __init__(self, folder: Path) -> None:
        self.run, self.store, self.root = folder / "run", folder / "store", folder / "run" / "checkpoints"
        self.overrides = [*MODEL, f"train.train_iters={ITERATIONS}", "checkpoint.max_checkpoint_keep=2"]
        self.overrides += [f"checkpoint.mirror=file://{self.store}", "checkpoint.mirror_wait_s=60"]
        self.words = [str(self.run), "--poll-seconds", "0.1", "--", "sh", "-c", LOOK, "sh", "{}", str(folder / "seen")]
        self._stacks = dict[str, contextlib.ExitStack]()
        self._running = dict[str, Running]()

    def start(self) -> bool:
        """Start what does not run; return whether the run has come to its end."""
        for name in ("run", "follower"):
            if name in self._running and self._running[name].processes[0].exitcode is None:
                continue
            if name in self._running:
                status = self._running[name].processes[0].exitcode
                assert status in (0, -signal.SIGKILL), self._running[name].ended().text
                if name == "run" and status == 0:
                    return True
                self._stacks[name].close()
            self._stacks[name] = contextlib.ExitStack()
            function = run_trainer if name == "run" else run_follower
            words = [f"run.dir={self.run}", *self.overrides] if name == "run" else self.words
            folder = self.run.with_name(f"{name}.logs")
            self._running[name] = self._stacks[name].enter_context(started(function, words, folder=folder, ranks=1))
        return False

    def kill(self, victim: str) -> bool:
        """Kill a process; return whether it was alive."""
        process = self._running["follower" if victim == "follower" else "run"].processes[0]
        number = uploader_of(process.pid or 0) if victim == "uploader" else process.pid
        if number is None or process.exitcode is not None:
            return False
        if victim == "run" and not CheckpointFolder(self.root, Files()).committed():
            return False  # the next start would refuse to begin anew
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        if victim != "uploader":
            process.join(DEADLINE_S)
        return True

    def pause(self, seconds: float) -> None:
        """Wait, or until the run has ended."""
        self._running["run"].processes[0].join(seconds)

    def end(self) -> None:
        """Kill what still runs."""
        for stack in self._stacks.values():
            stack.close()

    def lines(self) -> Counter[int]:
        """Return how often the follower has recorded each iteration."""
        path = self.run / "follow.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert not any(record["status"] for record in records)
        return Counter(record["iteration"] for record in records)


def uploader_of(parent: int) -> int | None:
    """Return the process that uploads for a run, if it has been started."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) == parent and b"reprise.stores.child" in (path / "cmdline").read_bytes():
                return int(path.name)
    return None


@pytest.mark.nightly
def test_run_uploader_and_follower_are_killed_at_random_moments(tmp_path: Path) -> None:
    draw, kills, number = random.Random(SEED), Counter[str](), 0
    unbroken = tmp_path / "unbroken" / "run"
    assert launch(unbroken, [*MODEL, f"train.train_iters={ITERATIONS}"]).ok
    while kills.total() < KILLS:
        number += 1
        scene = Scene(tmp_path / f"round{number}")
        try:
            while not scene.start():
                scene.pause(draw.uniform(0.0, LONGEST_S))
                victim = draw.choice(("run", "uploader", "follower"))
                kills[victim] += scene.kill(victim)
                print(f"seed {SEED}: {dict(kills)} kills in run {number}", flush=True)
                assert_equal(scene.store, unbroken / "checkpoints")
        finally:
            scene.end()
        assert follow.main(["--once", *scene.words]) == 0
        command = "-m", "reprise", "checkpoint", "mirror", scene.root, f"file://{scene.store}", "--once"
        subprocess.run([sys.executable, *command], timeout=DEADLINE_S)  # as the run says, if it ends early
        check_end(scene, unbroken / "checkpoints")
    print(f"seed {SEED}: {dict(kills)} kills in {number} whole runs")


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
    present = CheckpointFolder(scene.root, Files()).committed()
    lines = scene.lines()
    assert set(lines.values()) == {1}
    assert set(present) <= lines.keys()
    assert not [path for path in scene.root.rglob("*") if path.name.endswith(TEMPORARY)]
    assert not list(scene.store.rglob(".upload-*"))
