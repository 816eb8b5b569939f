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

The exit status is 0 if all hold and 1 if not. The log and the disk at its start then stay in the folder, and a `Replay`
recreates the disk of the cut. It is 77 if mounting is not possible. Needs root; nothing stays mounted.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reprise.errors import TrainerError
from reprise.loading import open_checkpoint, verify_share
from reprise.storage import CheckpointFolder, Files
from scripts.faults.power import mounting
from scripts.faults.power.job import PowerJob
from scripts.faults.power.mounting import FILE_SYSTEMS, CannotMount, FileSystem
from scripts.faults.power.recording import TIMEOUT_S, RecordedSoak, Recording, StartDisk, record
from scripts.faults.power.replay import PowerCut, Replay, Survival, copy_sparse
from scripts.faults.run_files import contents_of, curve_of, differences, leftovers

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


@dataclass(frozen=True, slots=True)
class Unbroken:
    """The results of a run without a cut: the files of each checkpoint, and the curve."""

    checkpoints: dict[int, dict[str, bytes]]
    curve: list[tuple[object, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print a summary of each file system and return the exit status."""
    parser = argparse.ArgumentParser(prog="soak_power", description="Cut the power of a disk that a job saves to.")
    parser.add_argument("cuts", type=int, help="how many on each file system")
    parser.add_argument("--on", nargs="*", default=[*FILE_SYSTEMS], choices=[*FILE_SYSTEMS], metavar="FILE_SYSTEM")
    parser.add_argument("--recordings", type=int, default=2, help="jobs on each file system")
    parser.add_argument("--resume-every", type=int, default=20, help="resume after every so many cuts")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--topology", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for all jobs")
    parser.add_argument("--seed", type=int, default=0, help="of the cuts")
    parser.add_argument("--lies", action="store_true", help="let the disk forget what it flushed: must end with 1")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/soak_power"), help="deleted first, then created")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and unmount on the way out
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    plan = RecordedSoak(
        folder=options.folder.resolve(),
        cuts=options.cuts,
        recordings=options.recordings,
        resume_every=options.resume_every,
        iterations=options.iterations,
        ranks=options.ranks,
        seed=options.seed,
        overrides=tuple(options.topology),
        lies=options.lies,
    )
    is_fine = True
    try:
        mounting.mount_for_this_process_alone()
        unbroken = train_unbroken(plan)
        for name in options.on:
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


def train_unbroken(plan: RecordedSoak) -> Unbroken:
    """Train without a cut on an existing file system, and keep every checkpoint."""
    run = plan.folder / "unbroken"
    job = PowerJob(plan.command(run, keep=0), plan.folder / "unbroken.log", ranks=plan.ranks)
    statuses = job.end(TIMEOUT_S)
    if any(status != 0 for status in statuses):
        raise RuntimeError(f"the unbroken run ended with {statuses}, see {plan.folder}/unbroken.log")
    folder = CheckpointFolder(run / "checkpoints", Files())
    return Unbroken(
        {iteration: contents_of(folder.iteration(iteration)) for iteration in folder.committed()}, curve_of(run)
    )


def soak(plan: RecordedSoak, system: FileSystem, unbroken: Unbroken) -> PowerTally:
    """Record jobs on a file system and try cuts of each."""
    tally, cut_short = PowerTally(system.name), plan.folder / f"{system.name}.cut"
    start: StartDisk | None = None
    for number in range(plan.recordings):
        folder = plan.folder / f"{system.name}-{number}"
        folder.mkdir()
        chance = random.Random(f"{plan.seed} {system.name} {number}")
        recording = record(plan, system, folder, chance, start)
        start = None if start else cut_in_the_middle(recording, cut_short, chance)
        share = plan.cuts // plan.recordings + (number < plan.cuts % plan.recordings)
        Trial(plan, system, folder, unbroken, tally).go(recording, cuts(recording, share, chance))
        if tally.problems:
            break
        shutil.rmtree(folder)
    return tally


def cut_in_the_middle(recording: Recording, disk: Path, chance: random.Random) -> StartDisk | None:
    """Create and return the disk of a cut after a save that is not the last; None if there is none."""
    middle = recording.saved[len(recording.saved) // 4 : -1]
    if not middle:
        return None
    cut = PowerCut(chance.randint(middle[0][0], middle[-1][0]) + 1, chance.choice([*Survival]), chance.getrandbits(32))
    flushed = disk.with_suffix(".flushed")
    copy_sparse(recording.start.disk, flushed)
    replay = Replay(recording.entries, flushed)
    replay.advance(cut.entries)
    replay.make(cut, disk)
    replay.close()
    flushed.unlink()
    return StartDisk(disk, tuple(recording.told(cut)))


def cuts(recording: Recording, count: int, chance: random.Random) -> Iterator[PowerCut]:
    """Yield cuts in the order of the log: a third right after a reported save, the others anywhere."""
    places = []
    for number in range(count):
        if number % 3 == 0 and recording.saved:
            place = chance.choice(recording.saved)[0] + 1
        else:
            place = chance.randint(0, len(recording.entries))
        places.append((place, chance.choice([*Survival]), chance.getrandbits(32)))
    yield from (PowerCut(*point) for point in sorted(places, key=lambda point: point[0]))


@dataclass(frozen=True, slots=True)
class Trial:
    """Cuts of a recording: each disk is mounted and checked, and some runs are resumed."""

    plan: RecordedSoak
    system: FileSystem
    folder: Path
    unbroken: Unbroken
    tally: PowerTally

    def go(self, recording: Recording, tried: Iterable[PowerCut]) -> None:
        """Try cuts in the order of the log; stop after too many problems."""
        flushed, image = self.folder / "flushed", self.folder / "image"
        copy_sparse(recording.start.disk, flushed)
        replay = Replay(recording.entries, flushed)
        for number, cut in enumerate(tried, start=1):
            replay.advance(cut.entries)
            replay.make(cut, image)
            problems = self._after(image, recording.told(cut), resumes=number % self.plan.resume_every == 0)
            self.tally.survivals[cut.survival.value] += 1
            self.tally.problems += [f"{cut} of {self.folder}: {problem}" for problem in problems]
            if len(self.tally.problems) >= _MOST_PROBLEMS:
                break
        replay.close()

    def _after(self, image: Path, told: list[int], *, resumes: bool) -> list[str]:
        try:
            return self._mounted(image, told, resumes=resumes)
        except CannotMount as refused:  # as ext4 does where half of its superblock was written
            if not mounting.repair(self.system, image):
                return [str(refused)]
        self.tally.repaired += 1
        try:
            return self._mounted(image, told, resumes=resumes)
        except CannotMount as refused:
            return [f"also after a repair: {refused}"]

    def _mounted(self, image: Path, told: list[int], *, resumes: bool) -> list[str]:
        with mounting.mounted(self.system, image, self.folder / "mount"):
            return self._problems_on_disk(told) + (self._resume(told) if resumes else [])

    def _problems_on_disk(self, told: list[int]) -> list[str]:
        """Return the problems of the checkpoints on the disk, and the reported saves that are missing."""
        checkpoints = self._checkpoints
        committed = checkpoints.committed()
        self.tally.told += len(told)
        self.tally.checkpoints += len(committed)
        problems = [
            problem for iteration in committed for problem in self._compare(checkpoints.iteration(iteration), iteration)
        ]
        recorded = recorded_saves(self._run / "metrics.jsonl")
        for saves, who in ((told, "the job's output"), (recorded, "metrics.jsonl")):
            if missing := lost(saves, committed, keep=self.plan.keep):
                problems.append(f"of {saves}, saved as {who} says, {missing} are missing: {committed} are there")
        return problems

    def _resume(self, told: list[int]) -> list[str]:
        """Resume the job, and return its differences from the unbroken run."""
        self.tally.resumed += 1
        command, output = self.plan.command(self._run, keep=self.plan.keep), self.folder / "resumed.log"
        if not self._checkpoints.committed():
            command.append("checkpoint.load=none")  # a run with records and no checkpoint asks for it
        output.unlink(missing_ok=True)
        statuses = PowerJob(command, output, ranks=self.plan.ranks).end(TIMEOUT_S)
        if any(status != 0 for status in statuses):
            return [f"the resumed job ended with {statuses}: {output.read_text()[-2000:]}"]
        problems = self._problems_on_disk(told)
        if self.plan.iterations not in self._checkpoints.committed():
            problems.append(f"the resumed run has no last checkpoint: {self._checkpoints.committed()}")
        if curve_of(self._run) != self.unbroken.curve:
            problems.append("the curve of the resumed run is not the unbroken one")
        return problems + leftovers(self._run)

    @property
    def _run(self) -> Path:
        return self.folder / "mount" / "run"

    @property
    def _checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self._run / "checkpoints", Files())

    def _compare(self, path: Path, iteration: int) -> list[str]:
        try:
            checkpoint = open_checkpoint(path, Files())
            verify_share(checkpoint)
        except TrainerError as error:
            return [f"{path.name} is damaged: {error}"]
        return differences(path, self.unbroken.checkpoints[iteration])


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
