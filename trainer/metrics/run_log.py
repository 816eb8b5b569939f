"""A run's logging: log lines, `metrics.jsonl` and other metric sinks. Rank 0 only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from reprise.saving import SaveReport
from reprise.storage import FILE_SYSTEM, Json, make_folders, replace_file
from trainer.compare.text_table import duration
from trainer.launch.run_folder import run_folder_failed
from trainer.launch.start_times import StartTimes
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import JsonlFile, cut_after
from trainer.metrics.launch_log import LAUNCHES, LaunchOutcome
from trainer.metrics.memory import MemoryPeaks
from trainer.metrics.run_clock import run_clock
from trainer.metrics.sink import MetricSink

_log = logging.getLogger(__name__)

# Dense bfloat16 peak in FLOP/s from vendors' data sheets, keyed by a substring in the device name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "B200": 2250e12}

_SAVED = {"save": "", "local_save": " locally", "weights_save": ", its weights alone,"}


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """An iteration's figures.

    Args:
        seconds: The iteration's duration, excluding `checkpoint_seconds`.
        checkpoint_seconds: How long a save blocked training.
        data_seconds: How long rank 0 loaded data, included in `seconds`.
        global_batch_size: Samples in this iteration, for runs where the size changes.
        is_skipped: Whether the parameter update was skipped because of a nonfinite loss or gradient.
    """

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int
    seconds: float
    checkpoint_seconds: float
    data_seconds: float = 0.0
    global_batch_size: int | None = None
    is_skipped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> Json:
        """Return the iteration's `metrics.jsonl` record. `<name>_hex` preserves every bit of a figure."""
        figures = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}
        record: Json = {"iteration": self.iteration}
        for name, figure in figures.items():
            record |= {name: figure, f"{name}_hex": figure.hex()}
        record |= {
            "consumed_samples": self.consumed_samples,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": round(self.seconds, 6),
            "checkpoint_seconds": round(self.checkpoint_seconds, 6),
            "data_seconds": round(self.data_seconds, 6),
        }
        if self.global_batch_size is not None:
            record["global_batch_size"] = self.global_batch_size
        if self.is_skipped:
            record["skipped"] = True
        return record


class Slowdown:
    """How much longer iterations take while a save is being written, relative to the median before it.

    Compares seconds per sample, because the global batch may grow.
    """

    def __init__(self) -> None:
        self._baseline: deque[float] = deque(maxlen=50)  # seconds per sample without a save
        self._seconds, self._samples = 0.0, 0  # while a save is written

    def add(self, seconds: float, samples: int, *, is_saving: bool) -> None:
        """Count an iteration."""
        if is_saving:
            self._seconds, self._samples = self._seconds + seconds, self._samples + samples
        else:
            self._baseline.append(seconds / samples)

    def take(self) -> float:
        """Return the total slowdown in seconds since the last call, or 0 without iterations to compare."""
        seconds, samples = self._seconds, self._samples
        self._seconds, self._samples = 0.0, 0
        return seconds - samples * median(self._baseline) if self._baseline and samples else 0.0


class RunLog:
    """A run's log, also across resumes: lines for the terminal, and records for the sinks.

    Args:
        sinks: Metric sinks. `metrics.jsonl` is always written.
        clock: A monotonic clock in seconds.

    Attributes:
        train_iters: The run's last iteration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        train_iters: int,
        mfu_scale: float | None,
        sinks: Sequence[MetricSink] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._first_end: tuple[int, float] | None = None  # this launch's first iteration, and its end time
        self._folder = folder
        self.train_iters = train_iters
        self._mfu_scale = mfu_scale
        self._sinks = [*sinks]
        self._lines: JsonlFile | None = None
        self._failed = set[str]()  # the sinks whose first exception was logged
        self._launches: JsonlFile | None = None
        # Extra members for the next iteration's line: whether it is the first after a resume, and the startup times.
        self._first: dict[str, object] = {}

    def open(
        self,
        iteration: int,
        config: str,
        *,
        owes_evaluation: bool = False,
        age_s: float = 0.0,
        launch: str = "",
        description: Json | None = None,
    ) -> None:
        """Open the log after `iteration`. Later lines, from an abandoned branch, move to a side file.

        Args:
            config: The resolved configuration in YAML, stored as `config.yaml`.
            owes_evaluation: Whether the evaluation at `iteration` is still due or must be repeated.
            age_s: Seconds since the launch began.
            launch: The launch's random name. Empty for a launch that is not recorded, since it changes nothing.
            description: The launch's topology, settings and environment.

        Raises:
            TrainerError: The run's folder cannot be written.
        """
        try:
            make_folders(FILE_SYSTEM, self._folder)
            clock = run_clock(self._folder, (METRICS, LAUNCHES), age_s)
            began = round(clock() - age_s, 3)
            replace_file(FILE_SYSTEM, self._folder / "config.yaml", config.encode())
            cut_after(self._folder / METRICS, iteration, owes_evaluation=owes_evaluation)
            self._lines = JsonlFile(self._folder / METRICS, clock)
            # The first checkpoint makes the records durable. Make the file's name durable too.
            FILE_SYSTEM.sync_folder(self._folder)
            if launch:
                self._launches = JsonlFile(self._folder / LAUNCHES, clock)
        except OSError as error:
            raise run_folder_failed(self._folder, error) from error
        # `metrics.jsonl` comes last: a save it records, from which a killed run may resume, is then in all other sinks.
        sinks = [sink for sink in self._sinks if self._attempt(sink, partial(sink.start, self._folder, iteration))]
        self._sinks = [*sinks, self._lines]
        self._first = {"resumed": True} if iteration > 0 else {}
        if launch:
            self._first["launch"] = self._launch = launch
            self._add_launch("begin", iteration, {"began": began, **(description or {})})

    def ended(self, iteration: int, outcome: LaunchOutcome, reason: str = "") -> None:
        """Record this launch's end. Later calls do nothing."""
        self._add_launch("end", iteration, {"outcome": outcome.value, **({"reason": reason} if reason else {})})
        if self._launches is not None:
            self._launches.close()
            self._launches = None

    def _add_launch(self, event: str, iteration: int, members: Json) -> None:
        if self._launches is not None:
            self._launches.write({"event": event, "launch": self._launch, "iteration": iteration, **members})

    def started(self, times: StartTimes) -> None:
        """Log the startup times, and add them to the next iteration's line."""
        self._first["start"] = {phase: round(seconds, 3) for phase, seconds in times.seconds().items()}
        _log.info(str(times))

    def iteration(self, record: IterationRecord, memory: MemoryPeaks | None = None) -> None:
        """Log an iteration. With `memory` it has a line."""
        members = record.line()
        if memory is not None:
            members |= {f"{name}_bytes": size for name, size in memory._asdict().items() if size}
        self._write(members | self._first)
        self._first = {}
        now = self._clock()
        self._first_end = self._first_end or (record.iteration, now)
        if memory is not None:
            size = f" | {memory.limiting / 1e9:.1f} GB"
            mfu = "" if self._mfu_scale is None else f" | mfu {record.tokens_per_second * self._mfu_scale:.1%}"
            _log.info(
                f"step {record.iteration:5d}/{self.train_iters} | train loss {record.loss:.6f} | "
                f"norm {record.grad_norm:.4f} | lr {record.lr:.4e} | {record.seconds * 1e3:.1f} ms | "
                f"{record.tokens_per_second:.0f} tok/s{mfu}{size}{self._remaining_time(record.iteration, now)}"
            )

    def _remaining_time(self, iteration: int, now: float) -> str:
        """Estimate the remaining time from the pace since the first iteration, including evaluations and saves."""
        first, began = self._first_end or (iteration, now)
        remaining = self.train_iters - iteration
        if iteration <= first or remaining <= 0:
            return ""
        return f" | {duration((now - began) / (iteration - first) * remaining)} to go"

    def evaluation(self, iteration: int, loss: float, best: float | None, average_loss: float | None = None) -> None:
        """Log an evaluation, with the averaged weights' loss if any."""
        members = {"iteration": iteration, "event": "evaluation", "valid_loss": loss, "valid_loss_hex": loss.hex()}
        text = "none" if best is None else f"{best:.6f}"
        if average_loss is not None:
            members |= {"ema_loss": average_loss, "ema_loss_hex": average_loss.hex()}
            text += f" | averaged weights {average_loss:.6f}"
        self._write(members)
        _log.info(f"step {iteration:5d}/{self.train_iters} | valid loss {loss:.6f} | best {text}")

    def note(self, iteration: int, event: str, members: Mapping[str, object], text: str) -> None:
        """Log an event with the given members, and `text` as a warning."""
        self._write({"iteration": iteration, "event": event, **members})
        _log.warning(text)

    def save(self, report: SaveReport, *, slowdown_s: float, event: str = "save") -> None:
        """Log a committed save. `metrics.jsonl` gets its rounded figures, and the log line its duration and pause.

        Args:
            slowdown_s: How much longer iterations took while the save was written. May be negative, to keep sums
                unbiased.
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
        self._write({"iteration": report.iteration, "event": event, **rounded})
        _log.info(
            f"saved iteration {report.iteration}{_SAVED[event]} in {report.seconds:.2f} s "
            f"({report.written_bytes / 1e6:.1f} MB by this rank), training paused for "
            f"{report.blocked_s + report.waited_s:.3f} s: {report.path}"
        )

    def sync(self) -> None:
        """Make all lines durable, unless the disk fails. No checkpoint may be newer than the log. Thread-safe."""
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        """Close the sinks. A save that ends later has nothing to sync."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._attempt(sink, sink.close)

    def _write(self, record: Json) -> None:
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, record))

    def _attempt(self, sink: MetricSink, call: Callable[[], None]) -> bool:
        """Call a sink, and return whether it succeeded. Its first exception is logged."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, training goes on
            if sink.name not in self._failed:
                _log.error("Metrics could not be written to %s, and the run continues: %r", sink.name, error)
            self._failed.add(sink.name)
            return False
        return True


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bfloat16 peak in FLOP/s, or None if unknown."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
