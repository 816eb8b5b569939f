"""Rounds in which every way saves and loads the same state in turn, and their figures."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path

import numpy as np

from scripts.bench.probe import Loop, evict, files_of, fill_from, read_through, seconds_of, touched, trim
from scripts.bench.subject import Subject
from scripts.bench.ways import RAW, Saved, Way

ROUND = "round"  # the row of figures of a whole round


class Figure(Enum):
    """The measured quantities, in seconds or bytes."""

    DURABLE = auto()
    BLOCKED = auto()
    REPORTED_BLOCKED = auto()  # from our own report
    COST = auto()  # blocked and slowed down
    LOAD = auto()
    COLD_LOAD = auto()
    PEAK_BYTES = auto()
    DISK_BYTES = auto()
    COPY = auto()  # the whole state, between buffers that are already allocated
    WARM_READ = auto()  # the raw file into memory that is already allocated
    NOISE = auto()  # the loop with nothing beside it


Row = dict[Figure, float]


class Rounds:
    """The rows of all rounds by name, and the reason of each missing one."""

    def __init__(self) -> None:
        self.all: list[dict[str, Row]] = []
        self.reasons: dict[str, str] = {}

    def read(self, path: Path) -> None:
        """Add the rounds stored in a file, if it exists."""
        if path.exists():
            stored = json.loads(path.read_text())
            self.all += [{name: {Figure[key]: v for key, v in row.items()} for name, row in r.items()} for r in stored]

    def write(self, path: Path) -> None:
        """Store all rounds in a file."""
        stored = [
            {name: {f.name: v for f, v in row.items()} for name, row in round_rows.items()} for round_rows in self.all
        ]
        path.write_text(json.dumps(stored))

    def median(self, row: str, figure: Figure) -> float | None:
        """Return a figure's median over the rounds that have it."""
        values = [round_rows[row][figure] for round_rows in self.all if figure in round_rows.get(row, {})]
        return statistics.median(values) if values else None

    def ratio(self, row: str, figure: Figure, base: str, base_figure: Figure) -> float | None:
        """Return the median, over rounds, of the ratio of two figures of the same round."""
        values = [
            round_rows[row][figure] / round_rows[base][base_figure]
            for round_rows in self.all
            if figure in round_rows.get(row, {}) and base_figure in round_rows.get(base, {})
        ]
        return statistics.median(values) if values else None


def run_rounds(
    subject: Subject,
    ways: Mapping[str, Way],
    folder: Path,
    *,
    results: Rounds,
    rounds: int,
    loop: Loop,
    say: Callable[[str], None],
) -> None:
    """Let every way save and load in turn, in another order each round, and add the figures to `results`.

    The files of a round are deleted after it.
    """
    names, before = list(ways), len(results.all)
    buffer = touched(subject.own_bytes)
    for number in range(rounds):
        rows: dict[str, Row] = {}
        loop.learn()
        rows[ROUND] = {Figure.COPY: _copy_s(subject, buffer), Figure.NOISE: loop.noise()}
        for name in rotated(names, before + number):
            if name in results.reasons:
                continue
            say(f"round {number + 1} of {rounds}: {name}")
            folder_of_row = folder / "row"
            folder_of_row.mkdir(parents=True)
            try:
                rows[name] = _measure(subject, ways[name], folder_of_row, loop)
                if name == RAW:
                    read_through(folder_of_row)
                    rows[ROUND][Figure.WARM_READ] = seconds_of(partial(fill_from, files_of(folder_of_row), buffer.data))
            except ways[name].may_raise as error:
                results.reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"{name} cannot run: {results.reasons[name]}")
                subject.fill(number)  # the way may have changed the state
            finally:
                shutil.rmtree(folder_of_row)
        results.all.append(rows)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return `names` rotated by `number`."""
    first = number % max(1, len(names))
    return [*names[first:], *names[:first]]


def _copy_s(subject: Subject, buffer: np.ndarray) -> float:
    sources = subject.flat()
    targets = np.split(buffer, np.cumsum([source.nbytes for source in sources])[:-1])

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    return min(seconds_of(copy) for _ in range(3))


def _measure(subject: Subject, way: Way, folder: Path, loop: Loop) -> Row:
    """Save and load; each is done twice, and the seconds are those of the second.

    The host of a virtual machine may reclaim memory that its guest has freed, and its next use is slow: by a factor of
    five for the same raw write. Recently freed memory is still allocated.
    """
    digest = subject.digest()
    peaks = []
    trim()
    for number in range(2):
        target = folder / f"save-{number}"
        target.mkdir()
        os.sync()
        saved = way.save(target, loop)
        peaks.append(saved.peak_bytes)
        if number == 0:
            shutil.rmtree(target)
    row = _row_of(saved)
    row[Figure.PEAK_BYTES] = float(max(peaks))
    row[Figure.DISK_BYTES] = float(sum(path.stat().st_size for path in files_of(target)))
    read_through(target)
    for figure in (Figure.LOAD, Figure.LOAD, Figure.COLD_LOAD):
        if way.fills:
            subject.spoil()
        if figure is Figure.COLD_LOAD:
            evict(target)
        row[figure] = seconds_of(lambda: way.load(target))
        if subject.digest() != digest:
            raise ValueError("what was loaded is not what was saved")
    return row


def _row_of(saved: Saved) -> Row:
    return {
        Figure.DURABLE: saved.durable_s,
        Figure.BLOCKED: saved.blocked_s,
        Figure.REPORTED_BLOCKED: saved.reported_blocked_s,
        Figure.COST: saved.blocked_s + saved.slowed_s,
    }
