"""Runs for the tests of `reprise publish`: logs as a run writes, cuts and goes on with them, without training."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from reprise.format import Branch, Journal, Lineage
from tests.fakes import iteration_record
from trainer.metrics.run_log import RunLog
from trainer.publish.publisher import Publisher
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

# Values whose decimals would not keep their bits, and those that JSON lacks.
LOSSES = (0.1 + 0.2, 1e-310, 2.0**-1074, math.pi * 1e300, math.nan, math.inf)

# Stands for the package trackio where it is not installed: a file of lines for each remote run, a line for each key.
_TRACKIO = """
import json, os, pathlib

class SQLiteStorage:
    @staticmethod
    def bulk_log(project, run, metrics, steps, timestamps, config, log_ids, run_id):
        with pathlib.Path(os.environ["TRACKIO_DIR"], f"{run_id}.jsonl").open("a") as file:
            for row in zip(log_ids, steps, metrics, strict=True):
                file.write(json.dumps(row) + chr(10))
"""

CONFIG = "train:\n  seed: 7\nlogging:\n  log_interval: 1\n"


def loss_at(iteration: int, *, branch: int = 0) -> float:
    """Return the loss of an iteration of a branch."""
    return LOSSES[iteration % len(LOSSES)] if branch == 0 else 1.0 / (iteration + branch)


def fake_trackio(folder: Path) -> dict[str, str]:
    """Write a package that stands for trackio, and return the variables with which a process imports and uses it."""
    package = folder / "packages/trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sqlite_storage.py").write_text(_TRACKIO)
    paths = (str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": os.pathsep.join(paths), "TRACKIO_DIR": str(folder)}


def tracked(folder: Path) -> dict[str, dict[int, float]]:
    """Return the curves that the fake trackio has of its only run."""
    (path,) = folder.glob("*.jsonl")
    rows = {key: row for key, *row in map(json.loads, path.read_text().splitlines())}
    curves: dict[str, dict[int, float]] = {}
    for step, figures in rows.values():
        for name, value in figures.items():
            curves.setdefault(name, {})[step] = value
    return curves


class LoggedRun:
    """The folder of a run, and its log as starts of the run write it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log: RunLog | None = None

    def start(self, iteration: int, *, branch_id: str = "", config: str = CONFIG) -> None:
        """Go on after an iteration; with the id of a branch as a start does that goes back behind a checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, lineage = self.folder / "run.json", Lineage((Branch("a1b2c3", 0),))
        if path.exists():
            lineage = Journal.from_bytes(path.read_bytes(), where=path).lineage
        further = (Branch(branch_id, iteration),) if branch_id else ()
        path.write_bytes(Journal(Lineage((*lineage.branches, *further), lineage.parent)).to_bytes())
        self._log = RunLog(self.folder, train_iters=10_000, mfu_scale=None)
        self._log.open(iteration, config)

    def train(self, first: int, last: int, *, branch: int = 0) -> None:
        """Log iterations, an evaluation at every tenth, and a spike at every twentieth."""
        assert self._log is not None
        for iteration in range(first, last + 1):
            self._log.iteration(iteration_record(iteration, loss=loss_at(iteration, branch=branch)))
            if iteration % 10 == 0:
                self._log.evaluation(iteration, loss_at(iteration, branch=branch) / 2, None)
            if iteration % 20 == 0:
                self._log.note(iteration, "spike", {"figure": f"loss of {iteration}"}, "a spike")

    def kill(self) -> None:
        """End the log as a kill does: in the middle of a line."""
        assert self._log is not None
        self._log.close()
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 99999, "lo')


class MemoryTracker(Tracker):
    """A tracker with a server in memory. A row whose number is there is ignored, as by trackers with keys.

    Attributes:
        rows: by the id of the remote run.
        fails: whether the server cannot be reached.
        keeps: how many lines of a `send` arrive before the server fails; None for all.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[TrackerRow]] = {}
        self.configs: dict[str, Mapping[str, object]] = {}
        self.opened: list[str] = []
        self.fails = False
        self.keeps: int | None = None
        self._id = ""

    def open(self, run: RemoteRun) -> None:
        self._require()
        self._id = run.id
        self.opened.append(run.id)
        self.configs.setdefault(run.id, run.config)
        self.rows.setdefault(run.id, [])

    def send(self, rows: Sequence[TrackerRow]) -> None:
        self._require()
        present = {row.number for row in self.rows[self._id]}
        self.rows[self._id] += [row for row in rows[: self.keeps] if row.number not in present]
        if self.keeps is not None:
            raise ConnectionResetError

    def close(self) -> None:
        self._id = ""

    def _require(self) -> None:
        if self.fails:
            raise ConnectionRefusedError

    def losses(self, run_id: str) -> dict[int, str]:
        """Return the bits of the loss at each iteration; no iteration is there twice."""
        pairs = [(row.iteration, row.figures["train/loss"].hex()) for row in self.rows[run_id] if _has_loss(row)]
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)


def _has_loss(row: TrackerRow) -> bool:
    return "train/loss" in row.figures


def losses(first: int, last: int, *, branch: int = 0) -> dict[int, str]:
    """Return the bits of the losses that a run logs."""
    return {iteration: loss_at(iteration, branch=branch).hex() for iteration in range(first, last + 1)}


def publisher(run: Path, tracker: Tracker, name: str = "memory", *, project: str = "tests") -> Publisher:
    """Return a new publisher, as a new process has it."""
    return Publisher(run, name, tracker, project=project, title="run")


def publish(run: Path, tracker: Tracker, name: str = "memory") -> None:
    """Send all that the tracker lacks, as a new process does."""
    sender = publisher(run, tracker, name)
    try:
        sender.send()
        sender.finish()
    finally:
        sender.close()
