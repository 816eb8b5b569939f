"""The learning rate as a function of iterations or consumed samples: a resume needs no scheduler state. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import assert_never


class DecayStyle(Enum):
    """The decay's shape after warmup. Names are Megatron-LM's, in lower case."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"


@dataclass
class ScheduleSection:
    """The learning-rate schedule, over iterations or consumed samples.

    Any `*_samples` key selects samples, as does `train.train_samples` unless `lr_decay_iters` is set.

    Args:
        lr_decay_style: Decay after warmup. `wsd` holds the peak rate, then decays linearly.
        lr_warmup_iters: Iterations for the linear rise from 0. Null is 10, or half of a decay shorter than 10.
        lr_decay_iters: Iteration that reaches `min_lr`. Null is `train.train_iters`.
        min_lr: Learning rate after the decay.
        lr_wsd_decay_iters: Iterations for the `wsd` decay. Null is a tenth of `lr_decay_iters`.
        lr_warmup_samples: `lr_warmup_iters` in samples. Null is 10 times `train.global_batch_size`, or half of a
            smaller `lr_decay_samples`.
        lr_decay_samples: `lr_decay_iters` in consumed samples. Null is the run's length.
        lr_wsd_decay_samples: `lr_wsd_decay_iters` in samples. Null is a tenth of `lr_decay_samples`.
    """

    lr_decay_style: DecayStyle = DecayStyle.cosine
    lr_warmup_iters: int | None = None
    lr_decay_iters: int | None = None
    min_lr: float = 1e-4
    lr_wsd_decay_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_samples: int | None = None


_WARMUP_ITERS = 10  # the default, for schedules of at least this length


@dataclass(frozen=True, slots=True)
class RunLength:
    """A run's length.

    Args:
        is_in_samples: Whether the configuration sets it in samples.
        batch_size: The last global batch size.
    """

    iters: int
    samples: int
    is_in_samples: bool
    batch_size: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with all defaults filled in. Equal values give equal curves.

    Args:
        warmup: Warmup length, in consumed samples if `is_in_samples`, else in iterations, like `decay` and `wsd_decay`.
    """

    style: DecayStyle
    lr: float
    min_lr: float
    warmup: int
    decay: int
    wsd_decay: int
    is_in_samples: bool = False

    def at(self, iteration: int, consumed_samples: int) -> float:
        """Return the rate at an iteration; 0 before the first.

        Cosine: Loshchilov and Hutter 2017, "SGDR"; wsd: Hu et al. 2024, "MiniCPM", with a linear decay.

        Args:
            iteration: The iteration, counted from 1.
            consumed_samples: Consumed samples, including this iteration's.
        """
        count = consumed_samples if self.is_in_samples else iteration
        if count < 1:
            return 0.0
        rate = self._after_warmup(count)
        return self.lr * count / self.warmup if count <= self.warmup else rate

    def _after_warmup(self, count: int) -> float:
        match self.style:
            case DecayStyle.cosine:
                start, shape = self.warmup, _cosine
            case DecayStyle.linear:
                start, shape = self.warmup, _linear
            case DecayStyle.wsd:
                start, shape = self.decay - self.wsd_decay, _linear
            case DecayStyle.constant:
                return self.lr
            case style:
                assert_never(style)
        if count >= self.decay:
            return self.min_lr
        if count <= start:
            return self.lr
        return self.min_lr + shape((count - start) / (self.decay - start)) * (self.lr - self.min_lr)

    def record(self) -> dict[str, object]:
        """Return the schedule as JSON, whose keys name the unit."""
        unit = "samples" if self.is_in_samples else "iters"
        return {
            "style": self.style.value,
            "lr": self.lr,
            "min_lr": self.min_lr,
            **{f"{name}_{unit}": getattr(self, name) for name in COUNTS},
        }


def _cosine(progress: float) -> float:
    """Return the height above the lowest rate, from 1 to 0, at a fraction of the decay."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


COUNTS = ("warmup", "decay", "wsd_decay")  # schedule fields counting iterations or samples


def resolve(section: ScheduleSection, length: RunLength, lr: float) -> Schedule:
    """Resolve a section into a schedule for a run, with peak rate `lr`."""
    counts = _Counts.of(section, length)
    wsd = counts.decay // 10 if counts.wsd_decay is None else counts.wsd_decay
    return Schedule(
        style=section.lr_decay_style,
        lr=lr,
        min_lr=section.min_lr,
        warmup=counts.warmup,
        decay=counts.decay,
        wsd_decay=wsd if section.lr_decay_style is DecayStyle.wsd else 0,
        is_in_samples=counts.unit == "samples",
    )


def section_of(schedule: Schedule) -> ScheduleSection:
    """Convert a schedule back to a section that does not depend on the run's length and unit."""
    wsd = schedule.wsd_decay if schedule.style is DecayStyle.wsd else None
    wsd = None if wsd == schedule.decay // 10 else wsd
    section = ScheduleSection(lr_decay_style=schedule.style, min_lr=schedule.min_lr)
    if schedule.is_in_samples:
        section.lr_warmup_samples, section.lr_decay_samples, section.lr_wsd_decay_samples = (
            schedule.warmup,
            schedule.decay,
            wsd,
        )
    else:
        section.lr_warmup_iters, section.lr_decay_iters, section.lr_wsd_decay_iters = (
            schedule.warmup,
            schedule.decay,
            wsd,
        )
    return section


@dataclass(frozen=True, slots=True)
class _Counts:
    """A section's counts in a unit, `iters` or `samples`, and the run's length in the same unit."""

    unit: str
    length: int
    warmup: int
    decay: int
    wsd_decay: int | None
    has_warmup: bool
    has_decay: bool

    @staticmethod
    def of(section: ScheduleSection, length: RunLength) -> _Counts:
        is_in_samples = bool(
            _set_keys(section, "samples") or (length.is_in_samples and not _set_keys(section, "iters"))
        )
        unit = "samples" if is_in_samples else "iters"
        warmup, decay, wsd = (getattr(section, f"lr_{name}_{unit}") for name in COUNTS)
        run_length = length.samples if is_in_samples else length.iters
        end = run_length if decay is None else decay
        default = _WARMUP_ITERS * (length.batch_size if is_in_samples else 1)
        default = default if end >= default else max(0, end // 2)
        rise = default if warmup is None else warmup
        return _Counts(unit, run_length, rise, end, wsd, has_warmup=warmup is not None, has_decay=decay is not None)


def _set_keys(section: ScheduleSection, unit: str) -> list[str]:
    keys = [f"lr_{name}_{unit}" for name in COUNTS]
    return [key for key in keys if getattr(section, key) is not None]


def problems(section: ScheduleSection, length: RunLength, lr: float) -> list[str]:
    """Return all problems in a section, each with its key and value."""
    lines = []
    in_samples, in_iters = (_set_keys(section, unit) for unit in ("samples", "iters"))
    if in_iters and in_samples:
        samples_key = f"schedule.{in_samples[0]}"
        return [
            f"schedule.{key}: counts iterations, while {samples_key} counts samples; set one unit" for key in in_iters
        ]
    if in_iters and length.is_in_samples and section.lr_decay_iters is None:
        return [
            f"schedule.{key}: counts iterations, while train.train_samples counts samples; set schedule.lr_decay_iters "
            "too, or samples"
            for key in in_iters
        ]
    counts = _Counts.of(section, length)
    decay, warmup, wsd = (f"schedule.lr_{name}_{counts.unit}" for name in ("decay", "warmup", "wsd_decay"))
    if counts.has_decay and counts.decay < 1:
        lines.append(f"{decay}={counts.decay}: must be at least 1")
    if counts.warmup < 0:
        lines.append(f"{warmup}={counts.warmup}: must be 0 or more")
    if counts.has_warmup and counts.warmup > counts.length:
        lines.append(f"{warmup}={counts.warmup}: longer than the run, {_length_text(length, counts)}")
    elif counts.warmup > counts.decay:
        lines.append(f"{warmup}={counts.warmup}: longer than {decay}={counts.decay}")
    if not 0 <= section.min_lr <= lr:
        lines.append(f"schedule.min_lr={section.min_lr}: must be between 0 and optimizer.lr={lr}")
    if counts.wsd_decay is not None and section.lr_decay_style is not DecayStyle.wsd:
        lines.append(f"{wsd}={counts.wsd_decay}: belongs to schedule.lr_decay_style=wsd")
    elif counts.wsd_decay is not None and not 0 < counts.wsd_decay <= counts.decay - max(counts.warmup, 0):
        end = decay.removeprefix("schedule.")
        lines.append(f"{wsd}={counts.wsd_decay}: must fit between the warmup and {end}={counts.decay}")
    return lines


def _length_text(length: RunLength, counts: _Counts) -> str:
    """Describe the run's length in the schedule's unit, with its key."""
    unit = "samples" if length.is_in_samples else "iters"
    if counts.unit == unit:
        return f"train.train_{unit}={counts.length}"
    return f"the {counts.length} {'samples' if counts.unit == 'samples' else 'iterations'} of train.train_{unit}"
