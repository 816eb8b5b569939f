"""Kills a small run at calls to the file system, and says what each kill left: `python -m tests.crash.matrix --all`.

Runs of two hosts with local checkpoints are killed at every message of a save and of a start, too.

A kill is survived if every checkpoint on disk is byte for byte what an unbroken run wrote, none that was committed is
missing, and the same command, run again, ends with the curve and the checkpoints of the unbroken run and leaves
nothing temporary behind.

`killing.py` counts the calls of a process below a folder, and ends it before, after or half-way through the n-th. This
module runs `small_run.py` once for each call and looks at the folder twice: after the kill and after the next run. A
new way of saving or deleting is a `Scenario` here; the tests run a sample of its calls.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reprise.format import MANIFEST
from reprise.format.host_file import attempt_of
from reprise.loading import open_checkpoint
from reprise.storage import WEIGHTS, CheckpointFolder, Files, iteration_name
from scripts.faults.run_files import held_ranges
from tests.crash.hosts import union
from tests.crash.killing import AFTER, BEFORE, TORN
from tests.crash.small_run import Plan, main
from tests.harness import all_files, call_on_ranks, started
from tests.profiles import SEED

# Names of what is on its way: nothing of the kind may be left when a run has ended.
_TEMPORARY = (".partial", ".deleting", ".replaced", ".new")
_WRITES = ("write", "pwrite", "pwritev")
TIMEOUT_S = 300.0

Tensors = dict[str, bytes]
Case = tuple[int, int, str]  # the rank that dies, at which call, and when


@dataclass(frozen=True)
class Scenario:
    """What is killed: a plan, and the one that went before it and left checkpoints, if any."""

    name: str
    plan: Plan
    before: Plan | None = None


def scenarios(folder: Path) -> list[Scenario]:
    """Return all scenarios, with runs in `folder`."""
    run, found = str(folder / "run"), list[Scenario]()

    def add(kind: str, ranks: int, *, before: Plan | None = None, **settings: Any) -> None:
        name = f"{kind}, {ranks} rank{'s' if ranks > 1 else ''}"
        found.append(Scenario(name, Plan(run, ranks=ranks, **settings), before))

    for ranks in (1, 2):
        for keep in (1, 2):
            add(f"keep {keep}", ranks, keep=keep)
        first = Plan(run, ranks=ranks, keep=0)
        add("rewind", ranks, before=first, keep=2, seed=2, rewind_to=2, iterations=5)
        add("weights", ranks, iterations=3, weights=True)
        add("library", ranks, with_library=True)
    add("saved again", 1, before=Plan(run, iterations=2, keep=0), keep=0, saves_again=True)
    for copies in (0, 1):
        add(f"hosts, copies={copies}", 2, copies=copies)
    return found


class Trial:
    """A scenario, prepared: what an unbroken run leaves, and how many calls each rank makes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._plan, self._before = scenario.plan, scenario.before
        self._old: dict[int, Tensors] = {}
        self._template: Path | None = None
        if self._before is not None:
            _run_ok(self._before)
            self._old = _checkpoints(self._before)
            self._lines = _lines(self._plan.root / "metrics.jsonl")
            self._template = self._plan.root.rename(self._plan.beside("template"))
        # The reference keeps every checkpoint, in one folder; what is killed makes the same calls and deletes some.
        self._restore_template()
        _run_ok(replace(self._plan, keep=0, copies=None))
        self._new = _checkpoints(self._plan)
        self._weights = _weights(self._plan)
        self._weights_left: set[int] = set()
        self._curve = _lines(self._plan.root / "metrics.jsonl")
        self._restore_template()
        _run_ok(self._plan)
        self._left = _checkpoints(self._plan) if self._plan.copies is None else {}
        self.calls = [self._plan.beside(f"calls{rank}").read_text().split() for rank in range(self._plan.ranks)]

    def cases(self) -> list[Case]:
        """Return every case."""
        return [
            (rank, at, when)
            for rank, calls in enumerate(self.calls)
            for at, name in enumerate(calls)
            for when in (BEFORE, AFTER, TORN)
            if when != TORN or name in _WRITES
        ]

    def run(self, victim: int, at: int, when: str) -> list[str]:
        """Kill a run, look at what is left, run it again; return what is wrong."""
        self._restore_template()
        for notes in self._plan.root.parent.glob(f"{self._plan.root.name}.notes*"):
            notes.unlink()
        killed = replace(self._plan, victim=victim, at=at, when=when)
        with started(main, killed.arguments(), folder=killed.root, ranks=killed.ranks) as running:
            running.processes[victim].join(TIMEOUT_S)
            # A rank that outlives the victim goes on as it can, and is killed at some later moment.
            for process in running.processes:
                process.join(at % 4 * 0.01)
        ended = running.ended()
        found = [] if ended.statuses[victim] in (-9, 0) else [f"the victim ended otherwise: {ended.text[-500:]}"]
        found += self.after_the_kill()
        ended = call_on_ranks(main, self._plan.arguments(), folder=killed.root, ranks=killed.ranks, timeout_s=TIMEOUT_S)
        if not ended.ok:
            return [*found, f"it cannot go on: {ended.text[-2000:]}"]
        return found + self.after_the_end()

    def after_the_kill(self) -> list[str]:
        found = self._strange_checkpoints()
        there = CheckpointFolder(self._plan.checkpoints, Files()).committed()
        begun, committed = self._noted("begins"), self._noted("committed")
        if committed and (not there or not max(committed) <= there[-1] <= max(begun)):
            found.append(f"{max(committed)} was committed, {there} are there")
        missing = set(sorted({*committed} & {*self._new})[-self._plan.keep :]) - {*there}
        if missing:
            found.append(f"{missing} were committed and not to be deleted, {there} are there")
        self._weights_left = {*_weights(self._plan)}
        if lost := {*self._noted("committed-weights")} - self._weights_left:
            found.append(f"the weights of {lost} were committed and are not there")
        return found

    def after_the_end(self) -> list[str]:
        found = self._strange_checkpoints()
        folder = CheckpointFolder(self._plan.checkpoints, Files())
        there, kept = folder.committed(), {*self._left}
        if not kept <= {*there} or there[-1] != self._plan.iterations:
            found.append(f"at the end {there} are there, not {sorted(kept)}")
        if folder.tracker() != self._plan.iterations:
            found.append(f"the tracker says {folder.tracker()}")
        if self._plan.rewind_to is not None:
            found += self._lost_of_the_old_branch(there)
        elif superseded := folder.superseded():
            found.append(f"{superseded[0].name} is there, and no branch was given up")
        if _lines(self._plan.root / "metrics.jsonl") != self._curve:
            found.append("the curve is another")
        # Weights whose save was under way are lost with the process if a checkpoint after them was committed.
        resumed = int(self._plan.beside("resumed").read_text())
        weights = self._weights_left | {iteration for iteration in self._weights if iteration >= resumed}
        if _weights(self._plan).keys() != weights:
            found.append(f"at the end the weights of {sorted(_weights(self._plan))} are there, not {sorted(weights)}")
        return [*found, *self._leftovers()]

    def _leftovers(self) -> list[str]:
        names = [path.name for path in self._plan.root.rglob("*") if path.name.endswith(_TEMPORARY)]
        return [f"{name} is left" for name in names]

    def _strange_checkpoints(self) -> list[str]:
        """Return what is under a checkpoint's name and no unbroken run has written."""
        found = []
        for path in self._plan.checkpoints.glob("iter_*"):
            iteration = int(path.name[5:12])
            if _tensors(path) not in (self._old.get(iteration), self._new.get(iteration)):
                found.append(f"{path.name} is not what an unbroken run wrote")
        for iteration, tensors in _weights(self._plan).items():
            if tensors != self._weights[iteration]:
                found.append(f"the weights of {iteration} are not what an unbroken run wrote")
        return found

    def _lost_of_the_old_branch(self, there: Iterable[int]) -> list[str]:
        """Return what of the abandoned branch is not kept: as superseded checkpoints, and lines of a side file."""
        assert self._before is not None
        assert self._plan.rewind_to is not None
        beyond = range(self._plan.rewind_to + 1, self._before.iterations + 1)
        found = []
        for iteration in beyond:
            paths = self._plan.checkpoints.glob(f"{iteration_name(iteration)}.superseded-*")
            if self._old[iteration] not in [_tensors(path) for path in paths]:
                found.append(f"iteration {iteration} of the abandoned branch is lost")
            if (
                iteration in there
                and _tensors(self._plan.checkpoints / iteration_name(iteration)) != (self._new[iteration])
            ):
                found.append(f"iteration {iteration} is still that of the abandoned branch")
        sides = Counter(line for path in self._plan.root.glob("metrics.abandoned-*.jsonl") for line in _lines(path))
        abandoned = [line for line in self._lines if json.loads(line)["iteration"] in beyond]
        if any(sides[line] != 1 for line in abandoned):
            found.append("lines of the abandoned branch are lost, or there twice")
        return found

    def _noted(self, what: str) -> list[int]:
        lines = [line.split() for line in self._plan.beside("notes0").read_text().splitlines()]
        return [int(iteration) for word, iteration in lines if word == what]

    def _restore_template(self) -> None:
        shutil.rmtree(self._plan.root, ignore_errors=True)
        if self._template is not None:
            shutil.copytree(self._template, self._plan.root)


class HostTrial(Trial):
    """A trial of two hosts, each with a disk of its own; the reference is a run that saves into one folder."""

    _newest = 0

    def after_the_kill(self) -> list[str]:
        found = self._strange_checkpoints()
        begun, committed = self._noted("begins"), self._noted("committed")
        there = self._disk(0).committed()
        self._newest = max(there, default=0)
        if not max(committed, default=0) <= self._newest <= max(begun, default=0):
            found.append(f"{committed} were committed, {there} are there")
        if self._newest:
            attempt = attempt_of(self._disk(0).iteration(self._newest))
            disk = self._disk(1)
            paths = [disk.iteration(self._newest), disk.partial(self._newest, str(attempt))]
            if attempt not in map(attempt_of, paths):
                found.append(f"{self._newest} is committed, and not prepared on the other host")
        return found

    def after_the_end(self) -> list[str]:
        found = self._strange_checkpoints()
        resumed = int(self._plan.beside("resumed").read_text())
        if resumed != self._newest:
            found.append(f"{self._newest} was committed, the run went on from {resumed}")
        paths = []
        for rank in range(self._plan.ranks):
            disk = self._disk(rank)
            paths.append(disk.iteration(self._plan.iterations))
            if disk.committed()[-1:] != [self._plan.iterations]:
                found.append(f"at the end {disk.committed()} are on host {rank}")
            if disk.tracker() != self._plan.iterations:
                found.append(f"the tracker of host {rank} says {disk.tracker()}")
        if not found and union(paths) != tensor_files_of(self._new[self._plan.iterations]):
            found.append("the hosts' union is another than the shared folder")
        if _lines(self._plan.root / "metrics.jsonl") != self._curve:
            found.append("the curve is another")
        return [*found, *self._leftovers()]

    def _strange_checkpoints(self) -> list[str]:
        """Return the folders that list pieces which no unbroken run has written."""
        found = []
        for rank in range(self._plan.ranks):
            disk = self._disk(rank)
            for iteration in disk.committed():
                checkpoint = open_checkpoint(disk.iteration(iteration), Files())
                expected, given = self._new[iteration], all_files(checkpoint.path)
                is_equal = all(
                    given[place.file][lo:hi] == expected[place.file][lo:hi] for place, lo, hi in held_ranges(checkpoint)
                )
                jsons = [name for name in expected if name.endswith(".json") and name != MANIFEST]
                if not is_equal or any(given[name] != expected[name] for name in jsons):
                    found.append(f"iteration {iteration} on host {rank} is not what an unbroken run wrote")
        return found

    def _disk(self, rank: int) -> CheckpointFolder:
        return CheckpointFolder(self._plan.disk(rank), Files())


def trial_of(scenario: Scenario) -> Trial:
    """Prepare a scenario."""
    return Trial(scenario) if scenario.plan.copies is None else HostTrial(scenario)


def tensor_files_of(files: Tensors) -> Tensors:
    """Return the tensor files among the files of a checkpoint."""
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def _run_ok(plan: Plan) -> None:
    ended = call_on_ranks(main, plan.arguments(), folder=plan.root, ranks=plan.ranks, timeout_s=TIMEOUT_S)
    assert ended.ok, ended.text


def _checkpoints(plan: Plan) -> dict[int, Tensors]:
    folder = CheckpointFolder(plan.checkpoints, Files())
    return {iteration: _tensors(folder.iteration(iteration)) for iteration in folder.committed()}


def _weights(plan: Plan) -> dict[int, Tensors]:
    folder = CheckpointFolder(plan.checkpoints / WEIGHTS, Files())
    return {iteration: _tensors(folder.iteration(iteration)) for iteration in folder.committed()}


def _tensors(checkpoint: Path) -> Tensors:
    """Return all files of a checkpoint; of the manifest all but the name of the attempt, and the digest over it."""
    found = all_files(checkpoint)
    manifest = json.loads(found.pop(MANIFEST, b"{}"))
    del manifest["attempt"], manifest["xxh3_64"]
    return {**found, MANIFEST: json.dumps(manifest).encode()}


def _lines(path: Path) -> list[str]:
    """Return the records of a run, a torn one among them, without times and the marks of the first after a start."""
    marks = r', ?"resumed": ?true|, ?"(start|versions)": ?\{[^}]*\}|, ?"time": ?[\d.]+'
    return [re.sub(marks, "", line) for line in path.read_text().splitlines()]


def drawn(trial: Trial, part: int = 0, parts: int = 1) -> list[Case]:
    """Return a case of every kind of call and moment, or of the kinds of one of some parts."""
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in trial.cases():
        kinds.setdefault((trial.calls[case[0]][case[1]], case[2]), []).append(case)
    draw = random.Random(SEED)
    return [draw.choice(kinds[kind]) for kind in sorted(kinds)[part % parts :: parts]]


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.matrix", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every call, not one of each kind")
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th kill only, from the K-th on")
    options = parser.parse_args()
    failures, (part, parts) = 0, map(int, options.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        for number, scenario in enumerate(scenarios(Path(folder))):
            if options.only not in scenario.name:
                continue
            start = time.monotonic()
            trial = trial_of(replace_folder(scenario, Path(folder) / str(number)))
            cases = (trial.cases() if options.all else drawn(trial))[part - 1 :: parts]
            broken = {case: found for case in cases if (found := trial.run(*case))}
            failures += len(broken)
            for case, found in broken.items():
                print(f"  {scenario.name}, rank {case[0]}, {case[2]} call {case[1]}: {'; '.join(found)}")
            calls = " and ".join(str(len(names)) for names in trial.calls)
            print(
                f"{scenario.name}: {calls} calls, {len(cases)} kills, {len(cases) - len(broken)} survived, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    return 1 if failures else 0


def replace_folder(scenario: Scenario, folder: Path) -> Scenario:
    """Return a scenario with its runs in a folder of its own."""
    folder.mkdir()
    run = str(folder / "run")
    before = None if scenario.before is None else replace(scenario.before, folder=run)
    return replace(scenario, plan=replace(scenario.plan, folder=run), before=before)


if __name__ == "__main__":
    sys.exit(_main())
