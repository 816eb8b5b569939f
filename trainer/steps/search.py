"""Finds where two runs, or two records, diverge."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy

import reprise
from reprise.errors import DataError, count_of
from reprise.storage import exists
from trainer.compare.curves import Curve, Sides
from trainer.compare.read import read_curve
from trainer.steps.records import (
    RECORDS,
    StepDifference,
    StepRecord,
    first_difference,
    read_record,
)
from trainer.steps.replay import RecordedRun, read_run

_WINDOW = 3  # iterations recorded first, up to the last one trained
_MOST_LINES = 20  # replay output lines in an error


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of comparing two runs.

    Args:
        iteration: The first iteration with different figures in the runs' logs. None without a difference.
        difference: The first tensor with different bits.
        first: The iterations from which A and B were trained again. None if records were given.
        unrepeated: For A and B, the iterations in which the replay's figures differ from the run's log.
        saved: The first differing tensor in the newest common checkpoints, in words. Empty if they are equal.
        settings: Differing settings, in words.
        alone: How many tensors only A has, and only B.
    """

    iteration: int | None
    difference: StepDifference | None
    first: tuple[int, int] | None = None
    unrepeated: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    saved: str = ""
    settings: tuple[str, ...] = ()
    alone: tuple[int, int] = (0, 0)

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs: the logs, the tensors, the checkpoints, and each replay from its log."""
        return self.iteration is None and self.difference is None and not self.saved and not any(self.unrepeated)


def compare_steps(a: Path, b: Path, *, iteration: int | None = None, folder: Path | None = None) -> StepReport:
    """Find where two runs, or two `--record` folders, diverge.

    Args:
        iteration: The last iteration to train again. None selects the first with different figures.
        folder: The folder that keeps both records. None uses a temporary folder.

    Raises:
        TrainerError: The runs or records cannot be compared.
    """
    are_records = [exists(path / RECORDS.format(0)) for path in (a, b)]
    if all(are_records):
        records = read_record(a), read_record(b)
        if records[0].parts.keys().isdisjoint(records[1].parts):
            raise DataError("The records have no tensor in common", where=f"{a} and {b}", expected="equal iterations")
        settings, alone = _unlike(*records)
        return StepReport(None, first_difference(*records), settings=settings, alone=alone)
    if any(are_records):
        raise DataError("A run can only be compared with a run, and a record with a record", where=f"{a} and {b}")
    curves = read_curve(a), read_curve(b)
    sides = Sides.of(curves[0].points, curves[1].points, None)
    parting = next(iter(sides.iterations.tolist()), None)
    last = iteration or parting
    if last is None:
        if not len(sides.base):
            raise DataError("The runs have no iteration in common", where=f"{a} and {b}")
        return StepReport(None, None)
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-steps-")))
        runs = read_run(a, last), read_run(b, last)
        return _search(curves, parting, last, runs, folder)


def _search(
    curves: tuple[Curve, Curve],
    parting: int | None,
    last: int,
    runs: tuple[RecordedRun, RecordedRun],
    folder: Path,
) -> StepReport:
    first, saved = _starts(*runs)

    def records(begin: int, values: Sequence[str] = ()) -> tuple[StepRecord, StepRecord]:
        paths = [folder / f"{name}{begin}{'-values' if values else ''}" for name in "AB"]
        for run, start, path in zip(runs, first, paths, strict=True):
            launch_replay(run, start, last, begin, path, values)
        return read_record(paths[0]), read_record(paths[1])

    earliest = max(first) + 1
    begin = max(earliest, last - _WINDOW + 1)
    pair = records(begin)
    difference = first_difference(*pair)
    if difference is not None and difference.place.phase == "start" and begin > earliest:
        begin = earliest
        pair = records(begin)
        difference = first_difference(*pair)
    if difference is not None and difference.largest is None:
        difference = first_difference(*records(begin, [difference.place.key])) or difference
    unrepeated = _unrepeated(curves[0], pair[0]), _unrepeated(curves[1], pair[1])
    return StepReport(parting, difference, first, unrepeated, saved, *_unlike(*pair))


def _unlike(a: StepRecord, b: StepRecord) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Return the records' differing settings, in words, and how many tensors only either has."""
    x, y = a.header["settings"], b.header["settings"]
    settings = (
        f"{key}: {x.get(key)} and {y.get(key)}" for key in sorted(x.keys() | y.keys()) if x.get(key) != y.get(key)
    )
    return tuple(settings), (len(a.parts.keys() - b.parts.keys()), len(b.parts.keys() - a.parts.keys()))


def _starts(a: RecordedRun, b: RecordedRun) -> tuple[tuple[int, int], str]:
    """Return the iterations to train A and B from, and the difference between their newest common checkpoints.

    Both start at their newest equal checkpoints. If no checkpoints are equal, they start at the newest common
    iteration, and without a common iteration each starts at its own newest checkpoint.
    """
    common = sorted(a.saved.keys() & b.saved.keys())
    if not (a.saved and b.saved):
        raise DataError("The run has no checkpoint with optimizer state", where=(b if a.saved else a).folder)
    if not common:
        return (max(a.saved), max(b.saved)), ""
    first = common[-1]
    newest = _unequal(a, b, first)
    if newest:
        # Checkpoints are equal up to some iteration, and differ from then on.
        equal = bisect_left(common[:-1], True, key=lambda iteration: bool(_unequal(a, b, iteration)))
        first = common[equal - 1] if equal else first
    return (first, first), newest


def _unequal(a: RecordedRun, b: RecordedRun, iteration: int) -> str:
    """Return the first differing tensor in an iteration's checkpoints, in words. Empty if they are equal."""
    paths = a.saved[iteration], b.saved[iteration]
    if paths[0] is None or paths[1] is None:
        return ""
    for tensor in reprise.diff(paths[0], paths[1]).tensors:
        if tensor.result != "equal":
            size = "" if tensor.largest is None else f", by at most {tensor.largest:.3g}"
            return (
                f"iteration {iteration}, {tensor.name}: {tensor.differing} of {tensor.total} values differ{size}"
                f"{f' ({tensor.detail})' if tensor.detail else ''}"
            )
    return ""


def _unrepeated(curve: Curve, record: StepRecord) -> tuple[int, ...]:
    """Return the iterations in which the replay's figures differ from the run's log."""
    figures = record.figures()
    points = curve.points.take(numpy.isin(curve.points.iterations, [*figures]))
    rows = zip(points.iterations.tolist(), *points.values[:2].tolist(), strict=True)
    logged = {number: (loss.hex(), norm.hex()) for number, loss, norm in rows}
    return tuple(number for number, bits in figures.items() if logged.get(number, bits) != bits)


def launch_replay(run: RecordedRun, first: int, last: int, begin: int, out: Path, values: Sequence[str]) -> None:
    """Train a run again in processes on this host, with the same rank count, and record it in `out`.

    Args:
        first, last: The iterations to start from and to end after.
        begin: The first recorded iteration.
        values: Keys of places whose values are stored.

    Raises:
        DataError: The processes fail.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks), "-m"]
    # An installed library has no package `trainer`.
    command = [sys.executable, "-m", *(torchrun if run.ranks > 1 else []), "reprise", "compare-steps", str(run.folder)]
    options = {"--record": out, "--from": first, "--to": last, "--begin": begin}
    command += [str(word) for option in options.items() for word in option]
    command += [word for key in values for word in ("--values", key)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate()
    finally:
        process.terminate()  # torchrun ends its ranks, which run in their own sessions
        process.wait()
    if process.returncode:
        raise DataError(
            "The run cannot be trained again on this host",
            where=run.folder,
            found="\n".join(errors.splitlines()[-_MOST_LINES:]),
            fix="Record it where it was trained: torchrun ... reprise compare-steps RUN --record FOLDER --from N --to "
            "M; then compare the two folders.",
        )


def report_lines(report: StepReport) -> list[str]:
    """Return a report in words."""
    lines = list[str]()
    if report.iteration is not None:
        lines.append(f"the logs differ from iteration {report.iteration} on")
    elif report.first is not None:
        lines.append("the logs have equal bits in all iterations of both")
    elif report.difference is None and not report.settings:
        lines.append("nothing differs")
    if report.first is not None:
        lines.append("trained again: A from iteration {}, B from iteration {}".format(*report.first))
    if report.difference is not None:
        lines += ["first difference:", f"{report.difference.place}", f"  {report.difference.detail}"]
    elif report.first is not None:
        lines.append("no difference when trained again: every tensor and number has equal bits")
    for name, iterations in zip("AB", report.unrepeated, strict=True):
        if iterations:
            numbers = ", ".join(map(str, iterations))
            lines.append(f"{name} does not reproduce: its log has different figures at iteration {numbers}")
    if report.saved:
        lines.append(f"the checkpoints differ: {report.saved}")
    if report.settings:
        lines += ["settings that differ:", *(f"  {line}" for line in report.settings)]
    if any(report.alone):
        lines.append(
            f"not compared: {count_of(report.alone[0], 'tensor')} that only A has, {report.alone[1]} that only B has"
        )
    return lines
