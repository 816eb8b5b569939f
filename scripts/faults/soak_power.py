"""Cut the power of a disk during a training job, at any point, and check that no save was lost:

    python -m scripts.faults.soak_power 500
    python -m scripts.faults.soak_power 1000 --on ext4-writeback --resume-every 20

A job trains on a file system whose disk logs every write and flush. It is killed once and resumes. A cut is a position
in that log. All data flushed before the cut is on the disk; of the unflushed data none, some or all is, and of some
writes only some sectors. Every second job resumes from the disk of such a cut. After a cut the file system is mounted,
and these properties are checked:

* Every checkpoint in it is byte for byte that of an unbroken run.
* Every checkpoint that the job's output reported before the cut, or that metrics.jsonl on the disk records, exists,
  unless newer ones have replaced it.
* After every `--resume-every` cuts, the same command ends like the unbroken run.

The exit status is 0 if all hold and 1 if not. The log and the disk at its start then stay in the folder, and
`write_disk` recreates the disk of the cut. It is 77 if mounting is not possible. Needs root; nothing stays mounted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reprise.errors import TrainerError
from reprise.loading import open_checkpoint, verify_tensors
from reprise.storage import CheckpointFolder, Files
from scripts.faults.job import finish
from scripts.faults.power import mounting
from scripts.faults.power.mounting import FILE_SYSTEMS, CannotMount, FileSystem
from scripts.faults.power.recording import RecordedSoak, Recording, record
from scripts.faults.power.replay import PowerCut, Survival, write_disk
from scripts.faults.run_files import curve_of, differences, leftovers
from trainer.commands.arguments import local_path

_MOST_PROBLEMS = 5  # until a soak ends
CANNOT_MOUNT = 77  # the exit status of a test that cannot be made, for automake and others


@dataclass(slots=True)
class PowerTally:
    """The results of the cuts on a file system."""

    name: str
    survivals: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    told: int = 0
    resumed: int = 0
    repaired: int = 0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the summary as a line."""
        survivals = ", ".join(f"{count} {survival}" for survival, count in sorted(self.survivals.items()))
        verdict = "; ".join(self.problems) or "none damaged, none lost, all resumed runs equal to the unbroken one"
        return (
            f"{self.name}: {self.survivals.total()} cuts (unflushed writes that survived: {survivals}), "
            f"{self.told} saves told before them, {self.checkpoints} checkpoints compared after them, "
            f"{self.resumed} resumed, {self.repaired} repaired before they could be mounted: {verdict}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print a summary of each file system and return the exit status."""
    parser = argparse.ArgumentParser(prog="soak_power", description="Cut the power of a disk that a job saves to.")
    parser.add_argument("cuts", type=int, help="how many on each file system")
    parser.add_argument(
        "--on", dest="systems", nargs="*", default=[*FILE_SYSTEMS], choices=[*FILE_SYSTEMS], metavar="FILE_SYSTEM"
    )
    parser.add_argument("--recordings", type=int, default=2, help="jobs on each file system")
    parser.add_argument("--resume-every", type=int, default=20, help="resume after every so many cuts")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--topology", dest="overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for all jobs"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cuts")
    parser.add_argument("--lies", action="store_true", help="let the disk forget what it flushed: must end with 1")
    parser.add_argument(
        "--folder", type=local_path, default=Path("/dev/shm/soak_power"), help="deleted first, then created"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and unmount on the way out
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    plan = RecordedSoak(**vars(options))
    is_fine = True
    try:
        mounting.mount_for_this_process_alone()
        unbroken = train_unbroken(plan)
        for name in plan.systems:
            tally = soak(plan, FILE_SYSTEMS[name], unbroken)
            print(f"soak_power: {tally.line()}", flush=True)
            is_fine = is_fine and not tally.problems
    except CannotMount as error:
        print(f"soak_power: nothing can be mounted here: {error}", file=sys.stderr)
        return CANNOT_MOUNT
    if not is_fine:
        return 1
    shutil.rmtree(options.folder)
    return 0


def train_unbroken(plan: RecordedSoak) -> Path:
    """Train without a cut on an existing file system, keep every checkpoint and return the run's folder."""
    run, output = plan.folder / "unbroken", plan.folder / "unbroken.log"
    if status := finish(plan.job(run, output, keep=0)):
        raise RuntimeError(f"the unbroken run ended with {status}, see {output}")
    return run


def soak(plan: RecordedSoak, system: FileSystem, unbroken: Path) -> PowerTally:
    """Record jobs on a file system and try cuts of each; every second one resumes from a cut in the one before it."""
    tally, next_disk, told = PowerTally(system.name), plan.folder / f"{system.name}.cut", list[int]()
    for number in range(plan.recordings):
        folder = plan.folder / f"{system.name}-{number}"
        folder.mkdir()
        chance = random.Random(f"{plan.seed} {system.name} {number}")
        if next_disk.exists():
            next_disk.rename(folder / "start")
        else:
            mounting.make(system, folder / "start")
            told = []
        recording = record(plan, system, folder, chance, told)
        saved = recording.saved()
        middle = saved[len(saved) // 4 : -1]
        if number % 2 == 0 and middle:
            cut = cut_at(chance.randint(middle[0][0], middle[-1][0]) + 1, chance)
            write_disk(recording.entries, cut, recording.disk, next_disk)
            told = recording.told(cut)
        share = plan.cuts // plan.recordings + (number < plan.cuts % plan.recordings)
        Trial(plan, system, folder, unbroken, tally).go(recording, cuts(recording, share, chance))
        if tally.problems:
            break
        shutil.rmtree(folder)
    return tally


def cut_at(entries: int, chance: random.Random) -> PowerCut:
    """Return a cut of any kind after so many entries."""
    return PowerCut(entries, chance.choice([*Survival]), chance.getrandbits(32))


def cuts(recording: Recording, count: int, chance: random.Random) -> Iterator[PowerCut]:
    """Yield cuts: a third right after a reported save, the others anywhere."""
    saved = recording.saved()
    for number in range(count):
        if number % 3 == 0 and saved:
            yield cut_at(chance.choice(saved)[0] + 1, chance)
        else:
            yield cut_at(chance.randint(0, len(recording.entries)), chance)


@dataclass(frozen=True, slots=True)
class Trial:
    """Cuts of a recording: each disk is mounted and checked, and some runs are resumed."""

    plan: RecordedSoak
    system: FileSystem
    folder: Path
    unbroken: Path
    tally: PowerTally

    def go(self, recording: Recording, tried: Iterator[PowerCut]) -> None:
        """Try cuts; stop after too many problems."""
        image = self.folder / "image"
        for number, cut in enumerate(tried, start=1):
            write_disk(recording.entries, cut, recording.disk, image)
            problems = self._after(image, recording.told(cut), resumes=number % self.plan.resume_every == 0)
            self.tally.survivals[cut.survival.value] += 1
            self.tally.problems += [f"{cut} of {self.folder}: {problem}" for problem in problems]
            if len(self.tally.problems) >= _MOST_PROBLEMS:
                break

    def _after(self, image: Path, told: list[int], *, resumes: bool, is_repaired: bool = False) -> list[str]:
        try:
            with mounting.mounted(self.system, image, self.folder / "mount"):
                return self._problems_on_disk(told) + (self._resume(told) if resumes else [])
        except CannotMount as refused:  # as ext4 does where half of its superblock was written
            if is_repaired or not mounting.repair(self.system, image):
                return [f"{refused}, {'also after a repair' if is_repaired else 'and no repair'}"]
        self.tally.repaired += 1
        return self._after(image, told, resumes=resumes, is_repaired=True)

    def _problems_on_disk(self, told: list[int]) -> list[str]:
        """Return the problems of the checkpoints on the disk, and the reported saves that are missing."""
        checkpoints = self._checkpoints
        committed = checkpoints.committed()
        self.tally.told += len(told)
        self.tally.checkpoints += len(committed)
        problems = [problem for iteration in committed for problem in self._compare(checkpoints.iteration(iteration))]
        recorded = recorded_saves(self._run / "metrics.jsonl")
        for saves, who in ((told, "the job's output"), (recorded, "metrics.jsonl")):
            if missing := lost(saves, committed, keep=self.plan.keep):
                problems.append(f"of {saves}, saved as {who} says, {missing} are missing: {committed} are there")
        return problems

    def _resume(self, told: list[int]) -> list[str]:
        """Resume the job, and return its differences from the unbroken run."""
        self.tally.resumed += 1
        output = self.folder / "resumed.log"
        output.unlink(missing_ok=True)
        # A run with records and no checkpoint asks for it.
        more = [] if self._checkpoints.committed() else ["checkpoint.load=none"]
        if status := finish(self.plan.job(self._run, output, *more, keep=self.plan.keep)):
            return [f"the resumed job ended with {status}: {output.read_text()[-2000:]}"]
        problems = self._problems_on_disk(told)
        if self.plan.iterations not in self._checkpoints.committed():
            problems.append(f"the resumed run has no last checkpoint: {self._checkpoints.committed()}")
        if curve_of(self._run) != curve_of(self.unbroken):
            problems.append("the curve of the resumed run is not the unbroken one")
        return problems + leftovers(self._run)

    @property
    def _run(self) -> Path:
        return self.folder / "mount" / "run"

    @property
    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self._run / "checkpoints", Files())

    def _compare(self, path: Path) -> list[str]:
        try:
            checkpoint = open_checkpoint(path, Files())
            verify_tensors(checkpoint)
        except TrainerError as error:
            return [f"{path.name} is damaged: {error}"]
        return differences(path, self.unbroken / "checkpoints" / path.name)


def recorded_saves(metrics: Path) -> list[int]:
    """Return the iterations whose saves a metrics file records; damaged lines are ignored."""
    iterations = set()
    for line in metrics.read_bytes().split(b"\n") if metrics.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["event"] == "save":
                iterations.add(int(record["iteration"]))
    return sorted(iterations)


def lost(told: Sequence[int], committed: Sequence[int], *, keep: int) -> list[int]:
    """Return the iterations reported as saved that neither exist nor are replaced by `keep` newer ones."""
    return [
        iteration
        for iteration in told
        if iteration not in committed and sum(newer > iteration for newer in committed) < keep
    ]


if __name__ == "__main__":
    sys.exit(main())
