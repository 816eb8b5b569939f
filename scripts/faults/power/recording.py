"""Jobs of the trainer on a logged disk, and the saves that they report."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.storage import CheckpointFolder, Files
from scripts.faults.job import TrainerJob, ended, finish, wait_until
from scripts.faults.power import block_log, mounting
from scripts.faults.power.block_log import Entry, LogKind
from scripts.faults.power.mounting import FileSystem
from scripts.faults.power.replay import PowerCut, copy_sparse
from scripts.faults.soak_kill import MODEL

_SAID = re.compile(r"saved iteration (\d+) in ")
# Checkpoints of 1.2 MB: most of it is written in whole pages around the page cache, the rest through it.
_WIDER = ("model.n_embd=60", "model.intermediate_size=244", "checkpoint.save_interval=2", "train.threads=1")


@dataclass(frozen=True, slots=True)
class RecordedSoak:
    """The settings of a power soak in `folder`.

    Args:
        cuts: number of cuts on each file system.
        systems: the file systems, by name.
        recordings: number of recorded jobs on each file system.
        resume_every: number of cuts between two resumed jobs.
        keep: `checkpoint.max_checkpoint_keep`.
        lies: whether the disk loses flushed data, which the soak must detect.
    """

    folder: Path
    cuts: int
    systems: Sequence[str]
    recordings: int
    resume_every: int
    iterations: int
    ranks: int
    seed: int
    overrides: Sequence[str]
    lies: bool
    keep: int = 3

    def job(self, run: Path, output: Path, *more: str, keep: int) -> TrainerJob:
        """Start a job in `run` that keeps `keep` checkpoints, with more overrides."""
        settings = [f"train.train_iters={self.iterations}", f"checkpoint.max_checkpoint_keep={keep}", *more]
        return TrainerJob([f"run.dir={run}", *MODEL, *_WIDER, *self.overrides, *settings], output, ranks=self.ranks)


@dataclass(frozen=True, slots=True)
class Recording:
    """A job on a logged disk.

    Args:
        disk: the disk at the start of the log.
        told_before: the iterations reported as saved before.
    """

    disk: Path
    told_before: Sequence[int]
    entries: Sequence[Entry]

    def saved(self) -> list[tuple[int, int]]:
        """Return the iterations reported as saved, each after the number of the entry that ends the line."""
        saves, partial = [], ""
        for number, entry in enumerate(self.entries):
            if entry.kind is LogKind.SAID:
                *lines, partial = (partial + bytes(entry.data).decode(errors="replace")).split("\n")
                saves += [(number, int(match[1])) for line in lines if (match := _SAID.search(line))]
        return saves

    def told(self, cut: PowerCut) -> list[int]:
        """Return the iterations reported as saved before a cut."""
        return sorted({*self.told_before, *(iteration for number, iteration in self.saved() if number < cut.entries)})


def record(
    plan: RecordedSoak, system: FileSystem, folder: Path, chance: random.Random, told_before: Sequence[int]
) -> Recording:
    """Train on the disk `start` of a folder, logged: a job killed after it has saved some iterations, and a resume."""
    start, image, log, mount = (folder / name for name in ("start", "image", "log", "mount"))
    copy_sparse(start, image)
    mount.mkdir()
    enough = chance.randint(plan.iterations // 3, 2 * plan.iterations // 3)
    checkpoints, output = CheckpointFolder(mount / "run" / "checkpoints", Files()), mounting.said_in(folder / "fuse")
    with mounting.logged_device(image, log, folder / "fuse") as device, mounting.mounted(system, device, mount):
        job = plan.job(mount / "run", output, keep=plan.keep)
        with ended(job):
            wait_until(lambda: job.status() is not None or max(checkpoints.committed(), default=0) >= enough)
        status = finish(plan.job(mount / "run", output, keep=plan.keep))
    image.unlink()
    entries = [entry for entry in block_log.read(log) if not (plan.lies and entry.kind is LogKind.FLUSH)]
    if status != 0:
        text = b"".join(bytes(entry.data) for entry in entries if entry.kind is LogKind.SAID)
        raise RuntimeError(f"a job ended with {status} on a disk without a fault:\n{text.decode(errors='replace')}")
    return Recording(start, told_before, entries)
