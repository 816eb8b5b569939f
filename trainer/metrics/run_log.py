"""What a run shows and records: log lines, `metrics.jsonl`, TensorBoard. Rank 0 only; it sees no tensor."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainer.checkpoint.policy import SaveReport
from trainer.checkpoint.storage.files import Files, make_folders, replace_file, temporary_of
from trainer.launch.run_folder import run_folder_failed
from trainer.metrics.progress_bar import RunBar
from trainer.metrics.tensorboard_files import cut_events, put_before
from trainer.regular_file import read_regular

_log = logging.getLogger(__name__)

# Dense bfloat16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "B200": 2250e12}

_METRICS = "metrics.jsonl"
_EVENTS = "tensorboard"  # the folder of TensorBoard's files
_VALID_LOSS = "valid/loss"


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """The figures of one iteration; `checkpoint_seconds` is what saving kept it, or its beginning, beside `seconds`.

    With `is_skipped`, loss or gradients were not finite, and the parameters stayed as they were.
    """

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int
    seconds: float
    checkpoint_seconds: float
    is_skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> dict[str, object]:
        """Return the members of its line in `metrics.jsonl`; a number that JSON lacks is null beside its hex form."""
        return {
            "iteration": self.iteration,
            "loss": _finite(self.loss),
            "loss_hex": self.loss.hex(),
            "grad_norm": _finite(self.grad_norm),
            "grad_norm_hex": self.grad_norm.hex(),
            "lr": self.lr,
            "lr_hex": self.lr.hex(),
            "consumed_samples": self.consumed_samples,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.seconds, 6),
            "checkpoint_seconds": round(self.checkpoint_seconds, 6),
            **({"skipped": True} if self.is_skipped else {}),
        }


class Slowdown:
    """How much longer iterations take while a save is written, against the median of those before."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=50)
        self._during: list[float] = []

    def add(self, seconds: float, *, is_saving: bool) -> None:
        """Count one iteration."""
        (self._during if is_saving else self._quiet).append(seconds)

    def take(self) -> float:
        """Return how many seconds longer the iterations of a save took in sum; 0 where there is nothing to compare."""
        during, self._during = self._during, []
        return sum(during) - len(during) * median(self._quiet) if self._quiet and during else 0.0


class RunLog:
    """The records of one run, continued where a checkpoint left off."""

    def __init__(
        self, folder: Path, *, train_iters: int, log_interval: int, tensorboard: bool, mfu_scale: float | None
    ) -> None:
        self._folder = folder
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._tensorboard = tensorboard
        self._mfu_scale = mfu_scale
        self._lines: _Lines | None = None
        self._bar: RunBar | None = None
        self._writer: Any = None
        self._purge_step = 1
        self._has_lost_points = False
        self._is_resumed = False  # until the first iteration after a resume is recorded

    def open(
        self, iteration: int, config: str, *, owes_evaluation: bool = False, began_elsewhere: bool = False
    ) -> None:
        """Begin after `iteration`: what other branches of the run recorded beyond it goes to a file beside.

        Args:
            config: the resolved configuration in YAML, kept as `config.yaml`.
            owes_evaluation: whether the evaluation of that iteration is still to come, or to come again.
            began_elsewhere: whether the iterations until now may be those of another run, which this one has no
                lines of.

        Raises:
            TrainerError: if the run's folder cannot be written.
        """
        path = self._folder / _METRICS
        try:
            make_folders(Files(), self._folder)
            replace_file(Files(), self._folder / "config.yaml", config.encode())
            recorded = cut_after(path, iteration, owes_evaluation=owes_evaluation)
            self._lines = _Lines(path)
            Files().sync_folder(self._folder)  # the records are durable with the first checkpoint, and so is their name
        except OSError as error:
            raise run_folder_failed(self._folder, error) from error
        self._report_gap(recorded, iteration, first=min(recorded, default=iteration + 1 if began_elsewhere else 1))
        but = _VALID_LOSS if owes_evaluation else None
        self._plot(lambda: cut_events(self._folder / _EVENTS, iteration, but=but), iteration)
        self._plot(lambda: put_before(self._folder / _EVENTS, int(time.time())), iteration)
        self._purge_step = iteration + 1
        self._is_resumed = iteration > 0
        self._bar = RunBar(sys.stdout, iteration=iteration, train_iters=self._train_iters)

    def _report_gap(self, recorded: Set[int], iteration: int, *, first: int) -> None:
        """Log which of the iterations from `first` to `iteration` have no line."""
        count = iteration + 1 - first - len(recorded)
        if count > 0:
            lacks = [number for number in range(first, iteration + 1) if number not in recorded]
            _log.warning(
                f"{self._folder / _METRICS} has no line of {count} iterations of this run, the first {lacks[0]}, the "
                f"last {lacks[-1]}: it was deleted or cut"
            )

    def iteration(self, record: IterationRecord) -> None:
        """Record one iteration."""
        self._write(record.line() | ({"resumed": True} if self._is_resumed else {}))
        self._is_resumed = False
        self._scalars(
            record.iteration,
            {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/tokens_per_second": record.tokens_per_second,
                "checkpoint/blocked_seconds": record.checkpoint_seconds,
            },
        )
        if self._bar is not None:
            self._bar.show(loss=record.loss, tokens_per_second=record.tokens_per_second)
        if record.iteration % self._log_interval == 0 or record.iteration == self._train_iters:
            mfu = "" if self._mfu_scale is None else f" | mfu {record.tokens_per_second * self._mfu_scale:.1%}"
            _log.info(
                f"step {record.iteration:5d}/{self._train_iters} | train loss {record.loss:.6f} | "
                f"norm {record.grad_norm:.4f} | lr {record.lr:.4e} | {record.seconds * 1e3:.1f} ms | "
                f"{record.tokens_per_second:.0f} tok/s{mfu}"
            )

    def evaluation(self, iteration: int, loss: float, best: float | None) -> None:
        """Record an evaluation."""
        self._write(
            {"iteration": iteration, "event": "evaluation", "valid_loss": _finite(loss), "valid_loss_hex": loss.hex()}
        )
        self._scalars(iteration, {_VALID_LOSS: loss})
        shown = "none" if best is None else f"{best:.6f}"
        _log.info(f"step {iteration:5d}/{self._train_iters} | valid loss {loss:.6f} | best {shown}")

    def sample(self, iteration: int, text: str) -> None:
        """Show a text of the model."""
        if self._tensorboard:
            shown = "    " + text.replace("\n", "\n    ")  # Markdown shows what is indented as it is
            self._plot(lambda: self._opened_writer().add_text("sample", shown, iteration), iteration)
        _log.info(f"step {iteration:5d}/{self._train_iters} | sample {text!r}")

    def save(self, report: SaveReport, *, slowdown_s: float) -> None:
        """Record a save that was committed; `slowdown_s` is what iterations took longer while it was written.

        It is recorded as measured, so that the sum over many saves has no bias; a negative one is shown as 0.
        """
        rate = report.written_bytes / max(report.seconds, 1e-9)
        figures = {
            "seconds": report.seconds,
            "blocked_seconds": report.blocked_s,
            "waited_seconds": report.waited_s,
            "slowdown_seconds": slowdown_s,
            "written_bytes": report.written_bytes,
            "copied_bytes": report.copied_bytes,
            "gigabytes_per_second": rate / 1e9,
        }
        rounded = {name: round(figure, 6) for name, figure in figures.items()}
        # A run that is killed before the next save resumes from this one: what its records show, TensorBoard shows too.
        self._scalars(report.iteration, {f"save/{name}": figure for name, figure in figures.items()})
        self._flush()
        self._write({"iteration": report.iteration, "event": "save", **rounded})
        _log.info(
            f"saved iteration {report.iteration} in {report.seconds:.2f} s, {report.written_bytes / 1e6:.1f} MB "
            f"by this rank, {rate / 1e9:.2f} GB/s, blocked {report.blocked_s:.3f} s, waited {report.waited_s:.3f} s, "
            f"copied {report.copied_bytes / 1e6:.1f} MB, slowed iterations by {max(0.0, slowdown_s):.3f} s: "
            f"{report.path}"
        )

    def sync(self) -> None:
        """Make all records durable: a checkpoint must not be newer than they are, unless the disk fails them."""
        if self._lines is not None:
            self._lines.sync()
        self._flush()

    def close_bar(self) -> None:
        """Take the bar off the terminal: what comes then is no line of the log."""
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        """Close the files."""
        self.close_bar()
        if self._lines is not None:
            self._lines.close()
        if self._writer is not None:
            self._plot(lambda: self._writer.close(), self._purge_step)

    def _flush(self) -> None:
        if self._writer is not None:
            self._plot(lambda: self._writer.flush(), self._purge_step)

    def _write(self, members: Mapping[str, object]) -> None:
        assert self._lines is not None
        self._lines.add(json.dumps(members, allow_nan=False) + "\n")

    def _scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if self._tensorboard:
            self._plot(lambda: self._add_points(iteration, values), iteration)

    def _add_points(self, iteration: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._opened_writer().add_scalar(tag, value, iteration)

    def _opened_writer(self) -> Any:
        if self._writer is None:  # made with the first point: a run that does nothing leaves no file
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / _EVENTS), purge_step=self._purge_step)
        return self._writer

    def _plot(self, call: Callable[[], None], iteration: int) -> None:
        """Call TensorBoard, which is never worth the run: where the disk fails it, it begins anew."""
        try:
            call()
            self._has_lost_points = False
        except OSError as error:
            if not self._has_lost_points:
                _log.error("%s lacks points: %s", self._folder / _EVENTS, error)
            self._has_lost_points = True
            self._writer, self._purge_step = None, iteration + 1


class _Lines:
    """A file that lines are added to; where the disk fails, they wait in memory until it works again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting = bytearray()
        self._has_failed = False

    def add(self, line: str) -> None:
        """Add a line, which ends with its newline."""
        self._waiting += line.encode()
        self._try(self._write)

    def sync(self) -> None:
        """Make all lines durable."""
        self._try(self._write, lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Close the file, after a last try."""
        self._try(self._write)
        if self._waiting:
            _log.error("%s lacks its last %d bytes", self._path, len(self._waiting))
        os.close(self._descriptor)

    def _write(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]

    def _try(self, *calls: Callable[[], None]) -> None:
        try:
            for call in calls:
                call()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.error("%s cannot be written, its lines wait in memory: %s", self._path, error)
            self._has_failed = True


def cut_after(path: Path, iteration: int, *, owes_evaluation: bool = False) -> set[int]:
    """Move the lines of `path` beyond `iteration`, and torn ones, to `metrics.abandoned-k.jsonl`.

    Returns the iterations of training whose lines stay.

    With `owes_evaluation` the evaluation of that iteration goes too: it will be done again.

    They are in the other file before they leave this one. A process killed between leaves them in both; then the next
    cut writes the other file anew. What stays is always a new file: a process of before, stopped and gone on, still
    writes, but to the old one.
    """
    if not path.exists():
        return set()
    files, kept, cut, recorded = Files(), list[str](), list[str](), set[int]()
    for line in _read_lines(path):
        number, event = _parsed(line)
        is_kept = number is not None and number <= iteration
        if owes_evaluation and number == iteration:
            is_kept = event != "evaluation"
        (kept if is_kept else cut).append(line)
        if number is not None and is_kept and event is None:
            recorded.add(number)
    side, is_unfinished = _side_file(path, {*kept, *cut})
    if cut:
        replace_file(files, side, _to_bytes(cut))
    replace_file(files, path, _to_bytes(kept))
    if is_unfinished and not cut:
        files.remove_file(side)
    for left in (temporary_of(path), temporary_of(side)):
        files.remove_file(left)
    return recorded


def _side_file(path: Path, lines: Collection[str]) -> tuple[Path, bool]:
    """Return where lines cut from `path`, which holds `lines`, go, and whether a cut into that was not ended."""
    count, last = 1, list[str]()
    while (side := path.with_name(f"{path.stem}.abandoned-{count}.jsonl")).exists():
        last = _read_lines(side)
        count += 1
    if last and all(line in lines for line in last):
        return path.with_name(f"{path.stem}.abandoned-{count - 1}.jsonl"), True
    return side, False


def last_recorded_iteration(path: Path) -> int | None:
    """Return the last iteration that `path` records, or None if there is none."""
    if not path.exists():
        return None
    numbers = [_parsed(line)[0] for line in _read_lines(path)]
    return max((number for number in numbers if number is not None), default=None)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file with their ends; bytes that are no text, which a dying host may leave, survive."""
    return read_regular(path).decode("utf-8", errors="surrogateescape").splitlines(keepends=True)


def _to_bytes(lines: Iterable[str]) -> bytes:
    return "".join(lines).encode("utf-8", errors="surrogateescape")


def _parsed(line: str) -> tuple[int | None, object]:
    """Return the iteration of a line, None if it is torn, and its event, None if it is of training."""
    if not line.endswith("\n"):
        return None, None
    try:
        members = json.loads(line)
        number = members["iteration"]
        return (number if isinstance(number, int) else None), members.get("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
