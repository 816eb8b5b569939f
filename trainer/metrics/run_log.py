"""Logging of a run: log lines, `metrics.jsonl` and other sinks of metrics. Rank 0 only."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from reprise.saving import SaveReport
from reprise.storage import FILE_SYSTEM, Files, Json, make_folders, replace_file
from trainer.compare.text_table import duration
from trainer.launch.run_folder import run_folder_failed
from trainer.launch.start_times import StartTimes
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_sink import JsonlSink
from trainer.metrics.launch_log import LAUNCHES, LaunchLog, LaunchOutcome
from trainer.metrics.memory import MemoryPeaks
from trainer.metrics.progress_bar import RunBar
from trainer.metrics.run_clock import run_clock
from trainer.metrics.sink import GuardedSink, MetricRecord, RunPosition, load_sink
from trainer.metrics.slow_ranks import SlowestRank
from trainer.record.versions import versions

_log = logging.getLogger(__name__)

# Dense bfloat16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "B200": 2250e12}


class LoggedFigure(NamedTuple):
    """What the log has of an attribute of `IterationRecord`.

    Attributes:
        curve: the tag of its TensorBoard curve; empty for no curve.
        is_exact: whether `metrics.jsonl` has it as `<name>_hex` too, which keeps every bit.
        digits: decimals in `metrics.jsonl`; None for all.
    """

    name: str
    curve: str = ""
    is_exact: bool = False
    digits: int | None = None


_FIGURES = (
    LoggedFigure("iteration"),
    LoggedFigure("loss", "train/loss", is_exact=True),
    LoggedFigure("grad_norm", "train/grad_norm", is_exact=True),
    LoggedFigure("lr", "train/lr", is_exact=True),
    LoggedFigure("consumed_samples"),
    LoggedFigure("tokens_per_second", "train/tokens_per_second", digits=1),
    LoggedFigure("seconds", digits=6),
    LoggedFigure("checkpoint_seconds", "checkpoint/blocked_seconds", digits=6),
    LoggedFigure("data_seconds", digits=6),
    LoggedFigure("global_batch_size", "train/global_batch_size"),
)


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """The figures of an iteration. A new figure has a line in `_FIGURES` too: `metrics.jsonl` and TensorBoard follow.

    Args:
        seconds: duration of the iteration, without `checkpoint_seconds`.
        checkpoint_seconds: time during which a save blocked training.
        data_seconds: time in which rank 0 loaded its data; part of `seconds`.
        global_batch_size: samples of the iteration, in runs where they change.
        is_skipped: whether the parameters were not updated, because of a nonfinite loss or gradient.
    """

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int
    seconds: float
    checkpoint_seconds: float
    data_seconds: float | None = None
    global_batch_size: int | None = None
    is_skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> dict[str, object]:
        """Return the members of its line in `metrics.jsonl`."""
        members = dict[str, object]()
        for name, _, is_exact, digits in _FIGURES:
            if (value := getattr(self, name)) is not None:
                members[name] = value if digits is None else round(value, digits)
                members |= {f"{name}_hex": value.hex()} if is_exact else {}
        return members | ({"skipped": True} if self.is_skipped else {})

    def curves(self) -> dict[str, float]:
        """Return its points by the tags of TensorBoard's curves."""
        points = {figure.curve: getattr(self, figure.name) for figure in _FIGURES if figure.curve}
        return {curve: value for curve, value in points.items() if value is not None}


class Slowdown:
    """How much longer iterations take while a save is being written, relative to the median of those before.

    Times are compared for each sample, since the global batch may grow.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=50)  # seconds of a sample
        self._seconds, self._samples = 0.0, 0  # beside a save

    def add(self, seconds: float, samples: int, *, is_saving: bool) -> None:
        """Count an iteration."""
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
    """The log of a run, continued from a checkpoint: lines for the terminal, and records for the sinks.

    Args:
        sinks: names of `SINKS`, beside `metrics.jsonl`.
        publish: the tracker that a process beside the run sends the log to; None for none.
        clock: a clock in seconds.

    Attributes:
        train_iters: the last iteration of the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        train_iters: int,
        log_interval: int,
        mfu_scale: float | None,
        sinks: Sequence[str] = (),
        files: Files = FILE_SYSTEM,
        publish: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._paced: tuple[int, float] | None = None  # the first iteration of this launch, and its end
        self._files = files
        self._folder = folder
        self.train_iters = train_iters
        self._log_interval = log_interval
        self._mfu_scale = mfu_scale
        self._names = sinks
        self._publish = publish
        self._sinks = list[GuardedSink]()
        self._bar: RunBar | None = None
        self._launch: LaunchLog | None = None
        # Members of the next iteration's line: whether it is the first after a resume, and the seconds of the start.
        self._first: dict[str, object] = {}

    def open(
        self,
        iteration: int,
        config: str,
        *,
        owes_evaluation: bool = False,
        began_elsewhere: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """Begin after `iteration`; lines of other branches of the run beyond it move to a side file.

        Args:
            config: the resolved configuration in YAML, kept as `config.yaml`.
            owes_evaluation: whether the evaluation of `iteration` is still due, or has to be repeated.
            began_elsewhere: whether the iterations so far may be those of another run, whose lines are not in this log.
            age_s: seconds since the launch began.

        Raises:
            TrainerError: if the run's folder cannot be written.
        """
        position = RunPosition(self._folder, self._files, iteration, owes_evaluation, began_elsewhere, config)
        try:
            make_folders(self._files, self._folder)
            self._record_clock = run_clock(self._folder, (METRICS, LAUNCHES), age_s)
            lines = JsonlSink(self._record_clock)
            replace_file(self._files, self._folder / "config.yaml", config.encode())
            lines.start(position)
        except OSError as error:
            raise run_folder_failed(self._folder, error) from error
        for name in self._names:
            self._sinks.append(GuardedSink(name, load_sink(name)))
            self._sinks[-1].start(position)
        # The lines are last: a save that they record, from which a killed run may resume, is in the other sinks too.
        self._sinks.append(GuardedSink(METRICS, lines))
        if self._publish is not None:
            self._start_publishing(self._publish, position)
        self._first = {"resumed": True} if iteration > 0 else {}
        self._bar = RunBar(sys.stdout, iteration=iteration, train_iters=self.train_iters)

    def launched(self, name: str, iteration: int, age_s: float, description: Json) -> None:
        """Record the begin of this launch; its name is also in the line of its next iteration.

        Args:
            name: a random name.
            iteration: the last iteration before.
            age_s: seconds since its processes started.
            description: its topology, settings and environment.

        Raises:
            TrainerError: if the run's folder cannot be written.
        """
        try:
            self._launch = LaunchLog(self._folder, name, self._record_clock)
        except OSError as error:
            raise run_folder_failed(self._folder, error) from error
        self._launch.begin(iteration, self._record_clock() - age_s, description)
        self._first["launch"] = name

    def rewound(self, iteration: int, members: Json) -> None:
        """Record a rewind of this launch."""
        if self._launch is not None:
            self._launch.rewound(iteration, members)

    def ended(self, iteration: int, outcome: LaunchOutcome, reason: str = "") -> None:
        """Record the end of this launch; a later call does nothing."""
        if self._launch is not None:
            self._launch.end(iteration, outcome, reason)
            self._launch = None

    def _start_publishing(self, tracker: str, position: RunPosition) -> None:
        """Start the process beside the run; it is the first sink, as `metrics.jsonl` is the last."""
        from trainer.metrics.publish_sink import PublishSink

        sink = GuardedSink(tracker, PublishSink(tracker))
        sink.start(position)
        self._sinks.insert(0, sink)

    def started(self, times: StartTimes) -> None:
        """Log the seconds of the start and the versions of packages, also with the next iteration."""
        self._first["versions"] = versions()
        self._first["start"] = {phase: round(seconds, 3) for phase, seconds in times.seconds().items()}
        _log.info(str(times))

    def iteration(
        self, record: IterationRecord, slowest: SlowestRank | None = None, memory: MemoryPeaks | None = None
    ) -> None:
        """Log an iteration, and with its line the slowest rank since the previous line, and the memory of ranks."""
        sizes = {} if memory is None else {name: size for name, size in memory._asdict().items() if size}
        curves = record.curves() | {f"train/{name}_bytes": float(size) for name, size in sizes.items()}
        members = record.line() | {f"{name}_bytes": size for name, size in sizes.items()} | self._first
        self._write(MetricRecord(record.iteration, members, curves))
        self._first = {}
        now = self._clock()
        self._paced = self._paced or (record.iteration, now)
        if self._bar is not None:
            self._bar.show(loss=record.loss, tokens_per_second=record.tokens_per_second)
        if has_line(record.iteration, self._log_interval, self.train_iters):
            size = "" if memory is None else f" | {memory.limiting / 1e9:.1f} GB"
            mfu = "" if self._mfu_scale is None else f" | mfu {record.tokens_per_second * self._mfu_scale:.1%}"
            _log.info(
                f"step {record.iteration:5d}/{self.train_iters} | train loss {record.loss:.6f} | "
                f"norm {record.grad_norm:.4f} | lr {record.lr:.4e} | {record.seconds * 1e3:.1f} ms | "
                f"{record.tokens_per_second:.0f} tok/s{mfu}{size}{self._to_the_end(record.iteration, now)}"
            )
            if slowest is not None:
                _log.info(f"step {record.iteration:5d}/{self.train_iters} | {slowest}")

    def _to_the_end(self, iteration: int, now: float) -> str:
        """Return the time to the end at the rate since the first iteration, evaluations and saves counted in."""
        first, began = self._paced or (iteration, now)
        remaining = self.train_iters - iteration
        if iteration <= first or remaining <= 0:
            return ""
        return f" | {duration((now - began) / (iteration - first) * remaining)} to go"

    def evaluation(self, iteration: int, loss: float, best: float | None, average_loss: float | None = None) -> None:
        """Log an evaluation, also of the moving averages if there are any."""
        members = {"iteration": iteration, "event": "evaluation", "valid_loss": loss, "valid_loss_hex": loss.hex()}
        curves, text = {"valid/loss": loss}, "none" if best is None else f"{best:.6f}"
        if average_loss is not None:
            members |= {"ema_loss": average_loss, "ema_loss_hex": average_loss.hex()}
            curves["valid/ema_loss"] = average_loss
            text += f" | of the averages {average_loss:.6f}"
        self._write(MetricRecord(iteration, members, curves))
        _log.info(f"step {iteration:5d}/{self.train_iters} | valid loss {loss:.6f} | best {text}")

    def sample(self, iteration: int, text: str) -> None:
        """Log a text generated by the model."""
        members = {"iteration": iteration, "event": "sample", "text": text}
        self._write(MetricRecord(iteration, members, texts={"sample": text}))
        _log.info(f"step {iteration:5d}/{self.train_iters} | sample {text!r}")

    def note(self, iteration: int, event: str, members: Mapping[str, object], text: str) -> None:
        """Log an event with these members of its line."""
        self._write(MetricRecord(iteration, {"iteration": iteration, "event": event, **members}))
        _log.warning(text)

    def save(self, report: SaveReport, *, slowdown_s: float, event: str = "save") -> None:
        """Log a committed save; `slowdown_s` is how much longer iterations took while it was being written.

        A `local_save` or a `weights_save`, which may come with every iteration, has a short line and no curve.

        The log line has the time and the pause; `metrics.jsonl` has every figure. The slowdown is recorded as measured,
        for an unbiased sum over many saves.
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
        members = {"iteration": report.iteration, "event": event, **rounded}
        if event != "save":
            self._write(MetricRecord(report.iteration, members))
            saved = (
                f"{report.iteration} locally" if event == "local_save" else f"{report.iteration}, its weights alone,"
            )
            _log.info(
                f"saved iteration {saved} in {report.seconds:.2f} s, training paused for {report.blocked_s:.3f} s"
            )
            return
        curves = {f"save/{name}": figure for name, figure in figures.items()}
        for sink in self._sinks:
            sink.write(MetricRecord(report.iteration, members, curves))
            if sink is not self._sinks[-1]:
                sink.sync()
        _log.info(
            f"saved iteration {report.iteration} in {report.seconds:.2f} s ({report.written_bytes / 1e6:.1f} MB by "
            f"this rank), training paused for {report.blocked_s + report.waited_s:.3f} s: {report.path}"
        )

    def sync(self) -> None:
        """Make all lines durable: a checkpoint must not be newer than the log, unless the disk fails. Any thread."""
        for sink in self._sinks:
            sink.sync()

    def close_bar(self) -> None:
        """Remove the progress bar from the terminal, before other output."""
        if self._bar is not None:
            self._bar.close()

    def close(self) -> None:
        """Close the sinks."""
        self.close_bar()
        for sink in self._sinks:
            sink.close()

    def _write(self, record: MetricRecord) -> None:
        for sink in self._sinks:
            sink.write(record)


def has_line(iteration: int, log_interval: int, train_iters: int) -> bool:
    """Return whether an iteration has a line of the log."""
    return iteration % log_interval == 0 or iteration == train_iters


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
