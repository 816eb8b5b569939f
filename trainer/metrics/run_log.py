"""Logging of a run: log lines, `metrics.jsonl` and TensorBoard. Rank 0 only."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from reprise.files import Files, make_folders, replace_file
from reprise.savers import SaveReport
from trainer.launch.run_folder import run_folder_failed
from trainer.launch.start_times import StartTimes
from trainer.metrics.jsonl_file import JsonlFile, cut_after
from trainer.metrics.progress_bar import RunBar
from trainer.metrics.slow_ranks import RankTime, SlowRanks
from trainer.metrics.tensorboard_files import cut_events, put_before

_log = logging.getLogger(__name__)

# Dense bfloat16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "B200": 2250e12}

_METRICS = "metrics.jsonl"
_EVENTS = "tensorboard"  # the folder of TensorBoard's files
_VALID_LOSS = "valid/loss"


def figure(
    name: str | None = None,
    *,
    curve: str | None = None,
    is_exact: bool = False,
    digits: int | None = None,
    is_optional: bool = False,
) -> Any:
    """Declare a field of `IterationRecord` that is logged.

    Args:
        name: key in `metrics.jsonl`, and attribute that is logged; by default the field's own name.
        curve: tag of its TensorBoard curve; None for no curve.
        is_exact: also write it as `<name>_hex`, which keeps every bit.
        digits: decimals in `metrics.jsonl`; None for all.
        is_optional: whether the field is None by default, and is then not logged.
    """
    metadata = {"name": name, "curve": curve, "is_exact": is_exact, "digits": digits}
    return field(default=None, metadata=metadata) if is_optional else field(metadata=metadata)


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """The figures of one iteration. A new one takes a single line here: `metrics.jsonl` and TensorBoard follow.

    Args:
        seconds: duration of the iteration, without `checkpoint_seconds`.
        checkpoint_seconds: time during which a save blocked training.
        global_batch_size: samples of the iteration, in runs where they change.
        is_skipped: whether loss or gradients were not finite, so that the parameters were not updated.
    """

    iteration: int = figure()
    loss: float = figure(curve="train/loss", is_exact=True)
    grad_norm: float = figure(curve="train/grad_norm", is_exact=True)
    lr: float = figure(curve="train/lr", is_exact=True)
    consumed_samples: int = figure()
    tokens: int = figure("tokens_per_second", curve="train/tokens_per_second", digits=1)
    seconds: float = figure(digits=6)
    checkpoint_seconds: float = figure(curve="checkpoint/blocked_seconds", digits=6)
    global_batch_size: int | None = figure(curve="train/global_batch_size", is_optional=True)
    is_skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> dict[str, object]:
        """Return the members of its line in `metrics.jsonl`."""
        members = dict[str, object]()
        for declared in fields(self):
            how = declared.metadata
            name = how.get("name") or declared.name
            value = getattr(self, name)
            if how and value is not None:
                members[name] = value if how["digits"] is None else round(value, how["digits"])
                if how["is_exact"]:
                    members[f"{name}_hex"] = value.hex()
        return members | ({"skipped": True} if self.is_skipped else {})

    def curves(self) -> dict[str, float]:
        """Return its points by the tags of TensorBoard's curves."""
        found = {
            declared.metadata["curve"]: getattr(self, declared.metadata["name"] or declared.name)
            for declared in fields(self)
            if declared.metadata.get("curve")
        }
        return {curve: value for curve, value in found.items() if value is not None}


class Slowdown:
    """How much longer iterations take while a save is being written, relative to the median of those before.

    Times are compared for each sample, since the global batch may grow.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=50)  # seconds of a sample
        self._seconds, self._samples = 0.0, 0  # beside a save

    def add(self, seconds: float, samples: int, *, is_saving: bool) -> None:
        """Count one iteration."""
        if is_saving:
            self._seconds, self._samples = self._seconds + seconds, self._samples + samples
        else:
            self._quiet.append(seconds / samples)

    def take(self) -> float:
        """Return the total slowdown of a save's iterations in seconds; 0 if there is nothing to compare with."""
        seconds, samples = self._seconds, self._samples
        self._seconds, self._samples = 0.0, 0
        return seconds - samples * median(self._quiet) if self._quiet and samples else 0.0


class RunLog:
    """The log of one run, continued from a checkpoint.

    Attributes:
        train_iters: the last iteration of the run.
    """

    def __init__(
        self, folder: Path, *, train_iters: int, log_interval: int, tensorboard: bool, mfu_scale: float | None
    ) -> None:
        self._folder = folder
        self.train_iters = train_iters
        self._log_interval = log_interval
        self._tensorboard = tensorboard
        self._mfu_scale = mfu_scale
        self._lines: JsonlFile | None = None
        self._bar: RunBar | None = None
        self._slow_ranks = SlowRanks()
        self._writer: Any = None
        self._purge_step = 1
        self._has_lost_points = False
        # Members of the next iteration's line: whether it is the first after a resume, and the seconds of the start.
        self._first: dict[str, object] = {}

    def open(
        self,
        iteration: int,
        config: str,
        *,
        owes_evaluation: bool = False,
        began_elsewhere: bool = False,
    ) -> None:
        """Begin after `iteration`; lines that other branches of the run logged beyond it move to a side file.

        Args:
            config: the resolved configuration in YAML, kept as `config.yaml`.
            owes_evaluation: whether the evaluation of that iteration is still due, or has to be repeated.
            began_elsewhere: whether the iterations so far may be those of another run, whose lines are not in this log.

        Raises:
            TrainerError: if the run's folder cannot be written.
        """
        path = self._folder / _METRICS
        try:
            make_folders(Files(), self._folder)
            replace_file(Files(), self._folder / "config.yaml", config.encode())
            recorded = cut_after(path, iteration, owes_evaluation=owes_evaluation)
            self._lines = JsonlFile(path)
            Files().sync_folder(self._folder)  # the records are durable with the first checkpoint, and so is their name
        except OSError as error:
            raise run_folder_failed(self._folder, error) from error
        self._report_gap(recorded, iteration, first=min(recorded, default=iteration + 1 if began_elsewhere else 1))
        but = _VALID_LOSS if owes_evaluation else None
        self._plot(lambda: cut_events(self._folder / _EVENTS, iteration, but=but), iteration)
        self._plot(lambda: put_before(self._folder / _EVENTS, int(time.time())), iteration)
        self._purge_step = iteration + 1
        self._first = {"resumed": True} if iteration > 0 else {}
        self._bar = RunBar(sys.stdout, iteration=iteration, train_iters=self.train_iters)

    def _report_gap(self, recorded: Set[int], iteration: int, *, first: int) -> None:
        """Log a warning about the iterations from `first` to `iteration` without a line."""
        count = iteration + 1 - first - len(recorded)
        if count > 0:
            lacks = [number for number in range(first, iteration + 1) if number not in recorded]
            _log.warning(
                f"{self._folder / _METRICS} has no line of {count} iterations of this run, the first {lacks[0]}, the "
                f"last {lacks[-1]}: it was deleted or cut"
            )

    def started(self, times: StartTimes) -> None:
        """Log the seconds of the start, also with the next iteration."""
        self._first["start"] = {phase: round(seconds, 3) for phase, seconds in times.seconds().items()}
        _log.info(str(times))

    def iteration(self, record: IterationRecord, rank_times: Sequence[RankTime] = ()) -> None:
        """Log one iteration, and at the log interval the rank that was slowest since the line before."""
        self._slow_ranks.add(rank_times)
        self._write(record.line() | self._first)
        self._first = {}
        self._scalars(record.iteration, record.curves())
        if self._bar is not None:
            self._bar.show(loss=record.loss, tokens_per_second=record.tokens_per_second)
        if record.iteration % self._log_interval == 0 or record.iteration == self.train_iters:
            mfu = "" if self._mfu_scale is None else f" | mfu {record.tokens_per_second * self._mfu_scale:.1%}"
            _log.info(
                f"step {record.iteration:5d}/{self.train_iters} | train loss {record.loss:.6f} | "
                f"norm {record.grad_norm:.4f} | lr {record.lr:.4e} | {record.seconds * 1e3:.1f} ms | "
                f"{record.tokens_per_second:.0f} tok/s{mfu}"
            )
            if slowest := self._slow_ranks.take():
                _log.info(f"step {record.iteration:5d}/{self.train_iters} | {slowest}")

    def evaluation(self, iteration: int, loss: float, best: float | None) -> None:
        """Log an evaluation."""
        self._write({"iteration": iteration, "event": "evaluation", "valid_loss": loss, "valid_loss_hex": loss.hex()})
        self._scalars(iteration, {_VALID_LOSS: loss})
        shown = "none" if best is None else f"{best:.6f}"
        _log.info(f"step {iteration:5d}/{self.train_iters} | valid loss {loss:.6f} | best {shown}")

    def sample(self, iteration: int, text: str) -> None:
        """Log a text generated by the model."""
        if self._tensorboard:
            shown = "    " + text.replace("\n", "\n    ")  # Markdown shows what is indented as it is
            self._plot(lambda: self._opened_writer().add_text("sample", shown, iteration), iteration)
        _log.info(f"step {iteration:5d}/{self.train_iters} | sample {text!r}")

    def save(self, report: SaveReport, *, slowdown_s: float, event: str = "save") -> None:
        """Log a committed save; `slowdown_s` is how much longer iterations took while it was being written.

        Of a `local_save` or a `weights_save`, which may come with every iteration, there is a short line and no curve.

        It is logged as measured, so that the sum over many saves is unbiased; a negative one is shown as 0.
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
        if event != "save":
            self._write({"iteration": report.iteration, "event": event, **rounded})
            saved = (
                f"{report.iteration} locally" if event == "local_save" else f"{report.iteration}, its weights alone,"
            )
            _log.info(f"saved iteration {saved} in {report.seconds:.2f} s, blocked {report.blocked_s:.3f} s")
            return
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
        """Make all lines durable: a checkpoint must not be newer than the log, unless the disk fails."""
        if self._lines is not None:
            self._lines.sync()
        self._flush()

    def close_bar(self) -> None:
        """Remove the progress bar from the terminal, before other output."""
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
        self._lines.add(members)

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
        """Call TensorBoard, whose failures do not stop the run: after a disk error it starts a new file."""
        try:
            call()
            self._has_lost_points = False
        except OSError as error:
            if not self._has_lost_points:
                _log.error("%s lacks points: %s", self._folder / _EVENTS, error)
            self._has_lost_points = True
            self._writer, self._purge_step = None, iteration + 1


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
