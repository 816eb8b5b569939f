"""Kill a training job at random times, restart the same command each time, and check that nothing was lost:

    python -m scripts.faults.soak_kill 20
    python -m scripts.faults.soak_kill 200 --ranks 2 --topology parallel.tensor_model_parallel_size=2
    python -m scripts.faults.soak_kill 200 --local /dev/shm/soak

With `--local` the job saves after every iteration, into a local folder only, and no kill may cost more than two
iterations.

After every kill each checkpoint is compared byte by byte with that of an unbroken run, and at the end the loss curve
bit by bit. The exit status is 0 if all is equal and no committed checkpoint was lost, else 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reprise.storage import CheckpointFolder, Files, iteration_name
from scripts.faults.job import SoakJob, TrainerJob, ended, finish, wait_until
from scripts.faults.run_files import curve_of, differences, differing_pieces, leftovers, rows_of
from trainer.commands.arguments import local_path

_MOST_LOST = 2  # iterations, where each is saved: one is written, the next one waits for it
# A model that trains a hundred iterations in a second or two on two cores.
MODEL = (
    "model=gpt2_tiny",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=20",
    "model.intermediate_size=44",
    "model.max_position_embeddings=32",
    "model.dropout=0.1",
    "train.seq_length=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.eval_interval=0",
    "logging.tensorboard=false",
    "checkpoint.save_interval=3",
)


Launch = Callable[[Path, Sequence[str]], SoakJob]


@dataclass(frozen=True, slots=True)
class Soak:
    """The settings of a kill soak: `kills` of a run of `iterations` in `folder`, at times derived from `seed`.

    Args:
        overrides: configuration overrides for the topology.
        keep: number of checkpoints to keep, see `checkpoint.max_checkpoint_keep`.
        local: where killed runs have their local checkpoints, saved after each iteration; None for none.
        hosts: how many hosts have a folder there each; `launch` mounts them where there are several.
    """

    folder: Path
    kills: int
    iterations: int = 200
    keep: int = 2
    seed: int = 0
    overrides: Sequence[str] = ()
    local: Path | None = None
    ranks: int = 2
    hosts: int = 1

    def settings(self, keep: int) -> list[str]:
        """Return the overrides of a run that keeps `keep` checkpoints in its own folder."""
        return [
            *MODEL,
            *self.overrides,
            f"train.train_iters={self.iterations}",
            f"checkpoint.max_checkpoint_keep={keep}",
            *(["checkpoint.save_interval=1"] if self.local is not None else []),
        ]

    def settings_of_killed(self, run: Path) -> list[str]:
        """Return the overrides of a run that is killed."""
        if self.local is None:
            return self.settings(self.keep)
        local = [f"checkpoint.local.dir={self.local_dir(run)}", f"checkpoint.local.keep={self.keep}"]
        return [*self.settings(0), "checkpoint.save=null", *local, "checkpoint.local.save_interval=1"]

    def local_dir(self, run: Path) -> Path:
        """Return the path of a run's local checkpoints on all hosts: the folder itself, or where it is mounted."""
        return self.folders(run)[0] if self.hosts == 1 else self.folders(run)[0].with_name("mounted")

    def folders(self, run: Path) -> list[Path]:
        """Return the checkpoint folders of a killed run, that of rank 0 first."""
        if self.local is None:
            return [run / "checkpoints"]
        return [self.local / run.name / f"host{number}" for number in range(self.hosts)]


@dataclass(slots=True)
class Tally:
    """The results of a soak."""

    moments: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    runs: int = 0
    problems: list[str] = field(default_factory=list)
    lost: Counter[int] = field(default_factory=Counter)  # kills by the iterations that they cost

    @property
    def kills(self) -> int:
        return self.moments.total()

    def line(self) -> str:
        """Return the summary as a line."""
        moments = ", ".join(f"{count} {moment}" for moment, count in sorted(self.moments.items()))
        lost = ", ".join(f"{number} by {count} kills" for number, count in sorted(self.lost.items()))
        verdict = "; ".join(self.problems) or "equal to the unbroken run, nothing lost"
        return (
            f"{self.kills} kills ({moments}), {self.checkpoints} checkpoints compared after them, "
            f"{self.runs} runs finished; iterations lost: {lost}: {verdict}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, print the summary and return the exit status."""
    parser = argparse.ArgumentParser(prog="soak_kill", description="Kill a training job at random times.")
    parser.add_argument("kills", type=int, help="how often")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--topology", dest="overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for both runs"
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--keep", type=int, default=2, help="checkpoint.max_checkpoint_keep of the killed run")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    parser.add_argument("--local", type=local_path, help="save local checkpoints there; deleted first, then created")
    parser.add_argument("--folder", type=local_path, default=Path("runs/soak"), help="deleted first, then created")
    options = parser.parse_args(arguments)
    for folder in filter(None, (options.folder, options.local)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    plan = Soak(**vars(options))

    def launch(run: Path, overrides: Sequence[str]) -> SoakJob:
        command = [f"run.dir={run.resolve()}", *overrides]
        return TrainerJob(command, run.with_name(f"{run.name}.log"), ranks=plan.ranks)

    tally = soak(plan, launch)
    print(f"soak_kill: {tally.line()}", flush=True)
    return 1 if tally.problems else 0


def soak(plan: Soak, launch: Launch) -> Tally:
    """Run a job unbroken, then kill others like it until the number of kills is reached; stop at the first problem."""
    unbroken, tally, chance = plan.folder / "unbroken", Tally(), random.Random(plan.seed)
    start = time.monotonic()
    job = launch(unbroken, plan.settings(0))
    with ended(job):
        wait_until(lambda: bool(curve_of(unbroken)) or job.status() is not None)
        startup_s = time.monotonic() - start
        finish(job)
    if job.status() != 0 or len(curve_of(unbroken)) != plan.iterations:
        tally.problems.append(f"the unbroken run ended with status {job.status()}")
    while tally.kills < plan.kills and not tally.problems:
        run = plan.folder / f"killed-{tally.runs + 1}"
        _Broken(plan, run, unbroken, tally=tally, chance=chance).go(launch, startup_s)
    return tally


@dataclass(slots=True)
class _Broken:
    """A run that is killed repeatedly until it has ended."""

    plan: Soak
    run: Path
    unbroken: Path
    tally: Tally
    chance: random.Random

    def go(self, launch: Launch, startup_s: float) -> None:
        """Start, kill, check and restart; let the last job end."""
        settings = self.plan.settings_of_killed(self.run)
        while not self.tally.problems:
            before, stamp, resumes = self._committed(), self._stamp(), self._resumes()
            job = launch(self.run, settings)
            with ended(job):
                if self.tally.kills < self.plan.kills:
                    self._await_moment(job, startup_s, stamp)
                else:
                    finish(job)
                status = job.status()
            if status is None:
                self.tally.moments[self._moment(stamp)] += 1
                self._check_checkpoints(before)
                self._check_resume(before, resumes)
                self._look_at_loss()
            elif status == 0:
                self._check_resume(before, resumes)
                self._check_end()
                return
            else:
                self.tally.problems.append(f"a start after a kill ended with status {status}, see {self.run}.log")

    def _await_moment(self, job: SoakJob, startup_s: float, stamp: int) -> None:
        """Wait until the job is to be killed, during its start or after some iterations, or has ended."""
        if self._committed() and self.chance.random() < 0.25:
            self._pass(job, self.chance.uniform(0, startup_s))
            return
        newest = max(self._committed(), default=0)
        share = 2 * (self.plan.iterations - newest) // (self.plan.kills - self.tally.kills + 1)
        target = newest + self.chance.randint(1, max(2, share))
        wait_until(
            lambda: (
                job.status() is not None
                or bool(self._stamp() != stamp and self._committed() and len(curve_of(self.run)) >= target)
            )
        )
        self._pass(job, self.chance.uniform(0, 0.05))

    def _pass(self, job: SoakJob, seconds: float) -> None:
        end = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= end or job.status() is not None)

    def _stamp(self) -> int:
        """Return a value that changes with every record."""
        path = self.run / "metrics.jsonl"
        return path.stat().st_mtime_ns if path.exists() else 0

    def _moment(self, stamp: int) -> str:
        """Return the activity of the killed job, as far as its folder shows it."""
        names = [path.name for folder in self.plan.folders(self.run) for path in folder.iterdir()]
        for ending, moment in ((".partial", "while saving"), (".deleting", "while deleting")):
            if any(name.endswith(ending) for name in names):
                return moment
        return "while starting" if self._stamp() == stamp else "between saves"

    def _committed(self) -> list[int]:
        return CheckpointFolder(self.plan.folders(self.run)[0], Files()).committed()

    def _resumes(self) -> list[int]:
        """Return the recorded iterations that are the first after a resume."""
        return [row["iteration"] for row in rows_of(self.run) if row.get("resumed")]

    def _check_resume(self, before: list[int], resumes: list[int]) -> None:
        """Check that the last job went on from the newest checkpoint, if it came as far as recording it."""
        if not before:
            return
        earlier = [iteration for iteration in resumes if iteration <= before[-1]]
        if self._resumes() not in (resumes, earlier, [*earlier, before[-1] + 1]):
            self.tally.problems.append(f"{before} were there, and a job went on with iteration {self._resumes()[-1:]}")

    def _look_at_loss(self) -> None:
        lost = max(0, len(curve_of(self.run)) - self._committed()[-1])
        self.tally.lost[lost] += 1
        if self.plan.local is not None and lost > _MOST_LOST:
            self.tally.problems.append(f"a kill cost {lost} iterations")

    def _check_checkpoints(self, before: list[int]) -> None:
        after = self._committed()
        if not after or (before and after[-1] < before[-1]):
            self.tally.problems.append(f"of {before} only {after} are left")
        for iteration in after:
            self.tally.checkpoints += 1
            self._compare(iteration)

    def _compare(self, iteration: int) -> None:
        for folder in self.plan.folders(self.run):
            path = folder / iteration_name(iteration)
            reference = self.unbroken / "checkpoints" / path.name
            if self.plan.local is None:
                self.tally.problems += differences(path, reference)
            elif path.exists():  # else it is prepared, for the next start
                self.tally.problems += differing_pieces(path, reference)

    def _check_end(self) -> None:
        self.tally.runs += 1
        if self._committed()[-1:] != [self.plan.iterations]:
            self.tally.problems.append(f"the last checkpoint is missing, {self._committed()} are there")
        self._check_checkpoints([])
        if curve_of(self.run) != curve_of(self.unbroken):
            self.tally.problems.append("the curves differ")
        self.tally.problems += leftovers(self.run, *self.plan.folders(self.run))


if __name__ == "__main__":
    sys.exit(main())
