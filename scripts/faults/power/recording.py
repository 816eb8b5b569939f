"""Jobs of the trainer on a logged disk, and the saves that they report."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.power import block_log, mounting
from scripts.faults.power.block_log import Entry, LogKind
from scripts.faults.power.job import PowerJob
from scripts.faults.power.mounting import FileSystem
from scripts.faults.power.replay import PowerCut, copy_sparse
from scripts.faults.soak_kill import MODEL

TIMEOUT_S = 300.0  # of a job
_SAID = re.compile(r"saved iteration (\d+) in ")
_POLL_S = 0.05
# Checkpoints of 1.2 MB: most of it is written in whole pages around the page cache, the rest through it.
_WIDER = ("model.n_embd=60", "model.intermediate_size=244", "checkpoint.save_interval=2")


@dataclass(frozen=True, slots=True)
class RecordedSoak:
    """The settings of a power soak in `folder`.

    Args:
        recordings: number of recorded jobs on each file system.
        resume_every: number of cuts between two resumed jobs.
        keep: `checkpoint.max_checkpoint_keep`.
        lies: whether the disk loses flushed data, which the soak must detect.
    """

    folder: Path
    cuts: int
    recordings: int = 2
    resume_every: int = 20
    iterations: int = 40
    keep: int = 3
    ranks: int = 1
    seed: int = 0
    overrides: tuple[str, ...] = ()
    lies: bool = False

    def command(self, run: Path, *, keep: int) -> list[str]:
        """Return the overrides of a job in `run` that keeps `keep` checkpoints."""
        return [
            f"run.dir={run}",
            *MODEL,
            *_WIDER,
            *self.overrides,
            f"train.train_iters={self.iterations}",
            f"checkpoint.max_checkpoint_keep={keep}",
        ]


@dataclass(frozen=True, slots=True)
class StartDisk:
    """A disk on which a job starts or resumes, and the iterations reported as saved before."""

    disk: Path
    told: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A job on a logged disk.

    Args:
        start: the disk at the start of the log.
        saved: the iterations that the job reported as saved, each after the number of the reporting entry.
    """

    start: StartDisk
    entries: list[Entry]
    saved: list[tuple[int, int]]

    def told(self, cut: PowerCut) -> list[int]:
        """Return the iterations reported as saved before a cut."""
        return sorted({*self.start.told, *(iteration for at, iteration in self.saved if at < cut.entries)})


def record(
    plan: RecordedSoak, system: FileSystem, folder: Path, chance: random.Random, start: StartDisk | None
) -> Recording:
    """Train on a logged disk: a job that is killed after it has saved some iterations, and a job that resumes.

    Args:
        start: the disk to resume from; None for an empty file system.
    """
    image, blank, log, mount = (folder / name for name in ("image", "blank", "log", "mount"))
    if start is None:
        mounting.make(system, image)
    else:
        start.disk.rename(image)
    copy_sparse(image, blank)
    mount.mkdir()
    enough = chance.randint(plan.iterations // 3, 2 * plan.iterations // 3)
    with mounting.logged_device(image, log, folder / "fuse") as device, mounting.mounted(system, device, mount):
        command, output = plan.command(mount / "run", keep=plan.keep), mounting.said_in(folder / "fuse")
        job = PowerJob(command, output, ranks=plan.ranks)
        try:
            _await_saved(log, enough, job)
        finally:
            job.kill()
        statuses = PowerJob(command, output, ranks=plan.ranks).end(TIMEOUT_S)
    image.unlink()
    entries = [entry for entry in block_log.read(log) if not (plan.lies and entry.kind is LogKind.FLUSH)]
    if any(status != 0 for status in statuses):
        raise RuntimeError(f"a job ended with {statuses} on a disk without a fault:\n{_text(entries)}")
    return Recording(StartDisk(blank, start.told if start else ()), entries, saved_in(entries))


def _await_saved(log: Path, iteration: int, job: PowerJob) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while job.is_running and not any(saved >= iteration for _, saved in saved_in(block_log.read(log))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"iteration {iteration} was not saved in time")
        time.sleep(_POLL_S)


def saved_in(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Return the iterations reported as saved, each with the number of the entry that ends the line."""
    saves, partial = [], ""
    for number, entry in enumerate(entries):
        if entry.kind is LogKind.SAID:
            *lines, partial = (partial + bytes(entry.data).decode(errors="replace")).split("\n")
            saves += [(number, int(match[1])) for line in lines if (match := _SAID.search(line))]
    return saves


def _text(entries: Sequence[Entry]) -> str:
    return b"".join(bytes(entry.data) for entry in entries if entry.kind is LogKind.SAID).decode(errors="replace")
