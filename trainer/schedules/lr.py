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
        return self.lr * count / self.warmup if count <= self.warmup else self._after_warmup(count)

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
    unit = _unit(section, length)
    warmup, decay, wsd = (getattr(section, f"lr_{name}_{unit}") for name in COUNTS)
    is_in_samples = unit == "samples"
    if decay is None:
        decay = length.samples if is_in_samples else length.iters
    if warmup is None:
        most = _WARMUP_ITERS * (length.batch_size if is_in_samples else 1)
        warmup = most if decay >= most else max(0, decay // 2)
    if section.lr_decay_style is not DecayStyle.wsd:
        wsd = 0
    elif wsd is None:
        wsd = decay // 10
    return Schedule(section.lr_decay_style, lr, section.min_lr, warmup, decay, wsd, is_in_samples)


def _unit(section: ScheduleSection, length: RunLength) -> str:
    """Return `samples` or `iters`, in which the section counts."""
    is_in_samples = _set_keys(section, "samples") or (length.is_in_samples and not _set_keys(section, "iters"))
    return "samples" if is_in_samples else "iters"


def _set_keys(section: ScheduleSection, unit: str) -> list[str]:
    keys = [f"lr_{name}_{unit}" for name in COUNTS]
    return [key for key in keys if getattr(section, key) is not None]


def problems(section: ScheduleSection, length: RunLength, lr: float) -> list[str]:
    """Return all problems in a section, each with its key and value."""
    lines = []
    in_samples, in_iters = (_set_keys(section, unit) for unit in ("samples", "iters"))
    follows_samples = length.is_in_samples and section.lr_decay_iters is None
    if in_iters and (in_samples or follows_samples):
        samples_key = f"schedule.{in_samples[0]}" if in_samples else "train.train_samples"
        return [
            f"schedule.{key}: counts iterations, while {samples_key} counts samples; set one unit" for key in in_iters
        ]
    schedule, unit = resolve(section, length, lr), _unit(section, length)
    wsd = getattr(section, f"lr_wsd_decay_{unit}")
    if schedule.warmup > schedule.decay:
        lines.append(f"schedule.lr_warmup_{unit}={schedule.warmup}: longer than the decay, {schedule.decay}")
    if not 0 <= section.min_lr <= lr:
        lines.append(f"schedule.min_lr={section.min_lr}: must be between 0 and optimizer.lr={lr}")
    if wsd is not None and section.lr_decay_style is not DecayStyle.wsd:
        lines.append(f"schedule.lr_wsd_decay_{unit}={wsd}: belongs to schedule.lr_decay_style=wsd")
    elif wsd is not None and wsd > schedule.decay - schedule.warmup:
        lines.append(f"schedule.lr_wsd_decay_{unit}={wsd}: must fit between the warmup and the decay, {schedule.decay}")
    return lines
