"""The learning rate as a function of the iteration, so that a resume needs no scheduler state. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class DecayStyle(Enum):
    """The shape of the decay after warm-up; the names are Megatron-LM's, in lower case."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"


@dataclass
class ScheduleSection:
    """The learning-rate schedule.

    Args:
        lr_decay_style: shape of the decay after warm-up; `wsd` holds the peak rate and then decays linearly.
        lr_warmup_iters: iterations over which the rate rises linearly from 0; null is 10, or half of `lr_decay_iters`
            where that is below 10.
        lr_decay_iters: iteration at which `min_lr` is reached; null is `train.train_iters`.
        min_lr: learning rate from `lr_decay_iters` on.
        lr_wsd_decay_iters: with `wsd`: iterations of the decay before `lr_decay_iters`; null is a tenth of that.
    """

    lr_decay_style: DecayStyle = DecayStyle.cosine
    lr_warmup_iters: int | None = None
    lr_decay_iters: int | None = None
    min_lr: float = 1e-4
    lr_wsd_decay_iters: int | None = None


_WARMUP_ITERS = 10  # the default, for schedules of at least this length


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with every default filled in; equal values give equal curves."""

    style: str
    lr: float
    min_lr: float
    warmup_iters: int
    decay_iters: int
    wsd_decay_iters: int

    def at(self, iteration: int) -> float:
        """Return the rate of an iteration, counted from 1.

        Cosine: Loshchilov and Hutter 2017, "SGDR"; wsd: Hu et al. 2024, "MiniCPM", with a linear decay.
        """
        if iteration <= self.warmup_iters:
            return self.lr * iteration / self.warmup_iters
        if self.style == "constant":
            return self.lr
        if iteration >= self.decay_iters:
            return self.min_lr
        begin = self.decay_iters - self.wsd_decay_iters if self.style == "wsd" else self.warmup_iters
        if iteration <= begin:
            return self.lr
        progress = (iteration - begin) / (self.decay_iters - begin)
        share = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.style == "cosine" else 1.0 - progress
        return self.min_lr + share * (self.lr - self.min_lr)


def resolve(section: ScheduleSection, train_iters: int, lr: float) -> Schedule:
    """Return the schedule of a section for a run of `train_iters` with peak rate `lr`."""
    decay_iters = train_iters if section.lr_decay_iters is None else section.lr_decay_iters
    wsd = decay_iters // 10 if section.lr_wsd_decay_iters is None else section.lr_wsd_decay_iters
    return Schedule(
        style=section.lr_decay_style.value,
        lr=lr,
        min_lr=section.min_lr,
        warmup_iters=_warmup_iters(section, decay_iters),
        decay_iters=decay_iters,
        wsd_decay_iters=wsd if section.lr_decay_style is DecayStyle.wsd else 0,
    )


def _warmup_iters(section: ScheduleSection, decay_iters: int) -> int:
    if section.lr_warmup_iters is not None:
        return section.lr_warmup_iters
    return _WARMUP_ITERS if decay_iters >= _WARMUP_ITERS else max(0, decay_iters // 2)


def problems(section: ScheduleSection, train_iters: int, lr: float) -> list[str]:
    """Return every problem of a section, each with its key and value."""
    found = []
    decay_iters = train_iters if section.lr_decay_iters is None else section.lr_decay_iters
    warmup = _warmup_iters(section, decay_iters)
    if section.lr_decay_iters is not None and section.lr_decay_iters < 1:
        found.append(f"schedule.lr_decay_iters={section.lr_decay_iters}: must be at least 1")
    if warmup < 0:
        found.append(f"schedule.lr_warmup_iters={warmup}: must be 0 or more")
    if section.lr_warmup_iters is not None and warmup > train_iters:
        found.append(f"schedule.lr_warmup_iters={warmup}: longer than the run, train.train_iters={train_iters}")
    elif warmup > decay_iters:
        found.append(f"schedule.lr_warmup_iters={warmup}: longer than schedule.lr_decay_iters={decay_iters}")
    if not 0 <= section.min_lr <= lr:
        found.append(f"schedule.min_lr={section.min_lr}: must be between 0 and optimizer.lr={lr}")
    wsd = section.lr_wsd_decay_iters
    if wsd is not None and section.lr_decay_style is not DecayStyle.wsd:
        found.append(f"schedule.lr_wsd_decay_iters={wsd}: belongs to schedule.lr_decay_style=wsd")
    elif wsd is not None and not 0 < wsd <= decay_iters - max(warmup, 0):
        found.append(f"schedule.lr_wsd_decay_iters={wsd}: must fit between warm-up and lr_decay_iters={decay_iters}")
    return found
