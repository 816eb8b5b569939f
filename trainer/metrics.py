"""What a run shows and records: log lines, `metrics.jsonl`, TensorBoard. Rank 0 only; it sees no tensor."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trainer.checkpoint.checkpointer import SaveReport
from trainer.checkpoint.files import Files, replace_file

_log = logging.getLogger(__name__)

# Dense bfloat16 peak in FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "B200": 2250e12}


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """The figures of one iteration; `seconds` without, `checkpoint_seconds` the time that saving blocked before it."""

    iteration: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int
    seconds: float
    checkpoint_seconds: float

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
        }


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
        self._file: TextIO | None = None
        self._writer: Any = None
        self._purge_step = 1

    def open(self, iteration: int, config: str) -> None:
        """Begin after `iteration`: what other branches of the run recorded beyond it goes to a file beside.

        Args:
            config: the resolved configuration in YAML, kept as `config.yaml`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(Files(), self._folder / "config.yaml", config.encode())
        path = self._folder / "metrics.jsonl"
        cut_after(path, iteration)
        self._file = path.open("a", encoding="utf-8")
        self._purge_step = iteration + 1

    def iteration(self, record: IterationRecord) -> None:
        """Record one iteration."""
        self._write(record.line())
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
        if record.iteration % self._log_interval == 0 or record.iteration == self._train_iters:
            mfu = "" if self._mfu_scale is None else f" | mfu {record.tokens_per_second * self._mfu_scale:.1%}"
            _log.info(
                f"step {record.iteration:5d}/{self._train_iters} | train loss {record.loss:.6f} | "
                f"norm {record.grad_norm:.4f} | lr {record.lr:.4e} | {record.seconds * 1e3:.1f} ms | "
                f"{record.tokens_per_second:.0f} tokens/s{mfu}"
            )

    def evaluation(self, iteration: int, loss: float, best: float | None) -> None:
        """Record an evaluation."""
        self._write(
            {"iteration": iteration, "event": "evaluation", "valid_loss": _finite(loss), "valid_loss_hex": loss.hex()}
        )
        self._scalars(iteration, {"valid/loss": loss})
        shown = "none" if best is None else f"{best:.6f}"
        _log.info(f"step {iteration:5d}/{self._train_iters} | valid loss {loss:.6f} | best {shown}")

    def save(self, report: SaveReport) -> None:
        """Record a save that was committed."""
        self._write(
            {
                "iteration": report.iteration,
                "event": "save",
                "seconds": round(report.seconds, 6),
                "written_bytes": report.written_bytes,
            }
        )
        _log.info(
            f"saved iteration {report.iteration} in {report.seconds:.2f} s, {report.written_bytes / 1e6:.1f} MB "
            f"by this rank, {report.written_bytes / max(report.seconds, 1e-9) / 1e9:.2f} GB/s: {report.path}"
        )

    def sync(self) -> None:
        """Make all records durable: a checkpoint must not be newer than they are."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()

    def _write(self, members: Mapping[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(members, allow_nan=False) + "\n")
        self._file.flush()

    def _scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if not self._tensorboard:
            return
        if self._writer is None:  # made with the first point: a run that does nothing leaves no file
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._purge_step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)


def cut_after(path: Path, iteration: int) -> None:
    """Move the lines of `path` beyond `iteration`, and torn ones, to `metrics.abandoned-k.jsonl`."""
    if not path.exists():
        return
    kept, cut = list[str](), list[str]()
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        number = _iteration_of(line)
        (kept if number is not None and number <= iteration else cut).append(line)
    if cut:
        count = 1
        while (side := path.with_name(f"{path.stem}.abandoned-{count}.jsonl")).exists():
            count += 1
        side.write_text("".join(cut), encoding="utf-8")
        replace_file(Files(), path, "".join(kept).encode())


def last_recorded_iteration(path: Path) -> int | None:
    """Return the last iteration that `path` records, or None if there is none."""
    if not path.exists():
        return None
    numbers = [_iteration_of(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    return max((number for number in numbers if number is not None), default=None)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s, or None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def _iteration_of(line: str) -> int | None:
    if not line.endswith("\n"):
        return None
    try:
        number = json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
