"""The learning rate is a function of the iteration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import says
from trainer.schedules.lr import DecayStyle, RunLength, Schedule, ScheduleSection, problems, resolve

ITERS = RunLength(200, 1600, False, 8)


def schedule(style: DecayStyle, **changes: object) -> Schedule:
    section = ScheduleSection(
        lr_decay_style=style, lr_warmup_iters=10, lr_decay_iters=110, min_lr=0.1, **changes  # type: ignore[arg-type]
    )  # fmt: skip
    return resolve(section, ITERS, 1.0)


@pytest.mark.parametrize("style", DecayStyle)
def test_warm_up_is_linear_from_zero_to_the_peak(style: DecayStyle) -> None:
    rates = [schedule(style).at(iteration, 0) for iteration in range(1, 11)]
    assert rates == [iteration / 10 for iteration in range(1, 11)]


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("unit", ["iters", "samples"])
def test_there_is_no_rate_before_the_first_iteration(unit: str, warmup: int) -> None:
    found = resolve(ScheduleSection(**{f"lr_warmup_{unit}": warmup}), ITERS, 1.0)  # type: ignore[arg-type]
    assert found.at(0, 0) == 0.0  # a save of the weights at the start records it
    assert found.at(1, 1) > 0.0


@pytest.mark.parametrize(
    ("style", "just_after_warm_up", "middle"),
    [
        (DecayStyle.constant, 1.0, 1.0),
        (DecayStyle.linear, 1.0 - 0.9 / 100, 0.55),
        (DecayStyle.cosine, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 100)), 0.55),
        (DecayStyle.wsd, 1.0, 1.0),
    ],
)
def test_rates_at_the_borders_of_the_decay(style: DecayStyle, just_after_warm_up: float, middle: float) -> None:
    found = schedule(style)
    assert found.at(10, 0) == 1.0
    assert found.at(11, 0) == pytest.approx(just_after_warm_up, rel=1e-12)
    assert found.at(60, 0) == pytest.approx(middle, rel=1e-12)
    floor = 1.0 if style is DecayStyle.constant else 0.1
    assert found.at(109, 0) >= floor
    assert [found.at(iteration, 0) for iteration in (110, 111, 10_000)] == [floor] * 3


def test_wsd_decays_in_its_last_iterations_only() -> None:
    by_default = schedule(DecayStyle.wsd)
    assert by_default.wsd_decay == 11
    assert (by_default.at(99, 0), by_default.at(100, 0) < 1.0) == (1.0, True)
    asked = schedule(DecayStyle.wsd, lr_wsd_decay_iters=20)
    assert (asked.at(90, 0), asked.at(100, 0), asked.at(110, 0)) == (1.0, pytest.approx(0.55), 0.1)


@given(st.sampled_from(list(DecayStyle)), st.integers(0, 50), st.integers(1, 200), st.floats(0, 1))
def test_rates_stay_within_bounds_and_never_rise_after_warm_up(
    style: DecayStyle, warmup: int, decay: int, floor: float
) -> None:
    section = ScheduleSection(
        lr_decay_style=style, lr_warmup_iters=min(warmup, decay), lr_decay_iters=decay, min_lr=floor
    )
    found = resolve(section, ITERS, 1.0)
    rates = [found.at(iteration, 0) for iteration in range(max(1, found.warmup), 201)]
    assert all(floor <= rate <= 1.0 for rate in rates)
    # A cosine may move by one unit in the last place.
    assert all(later <= earlier + 1e-15 for earlier, later in itertools.pairwise(rates))


def test_a_decay_left_open_follows_the_run() -> None:
    assert resolve(ScheduleSection(), RunLength(70, 560, False, 8), 1.0).decay == 70
    assert resolve(ScheduleSection(lr_decay_iters=50), RunLength(70, 560, False, 8), 1.0).decay == 50


@pytest.mark.parametrize(
    ("counts_samples", "changes"),
    [
        (False, {"lr_warmup_iters": 101}),
        (False, {"lr_warmup_iters": 60, "lr_decay_iters": 50}),
        (False, {"min_lr": 2.0}),
        (False, {"min_lr": math.nan}),
        (False, {"lr_wsd_decay_iters": 5}),
        (False, {"lr_wsd_decay_iters": 101, "lr_decay_style": DecayStyle.wsd}),
        (True, {"lr_warmup_samples": 801}),
        (True, {"lr_warmup_samples": 60, "lr_decay_samples": 50}),
        (True, {"lr_warmup_iters": 5}),
        (True, {"lr_warmup_iters": 101, "lr_decay_iters": 50}),
        (True, {"lr_warmup_samples": 5, "lr_decay_iters": 5}),
        (True, {"lr_wsd_decay_samples": 801, "lr_decay_style": DecayStyle.wsd}),
    ],
)
def test_an_impossible_schedule_is_named(counts_samples: bool, changes: dict[str, Any]) -> None:
    length = RunLength(100, 800, counts_samples, 8)
    lines = problems(ScheduleSection(**changes), length, 1.0)
    assert any(f"schedule.{next(iter(changes))}" in line for line in lines), lines
    says("\n".join(lines))
    assert problems(ScheduleSection(), length, 1.0) == problems(ScheduleSection(lr_decay_iters=50), length, 1.0) == []


@pytest.mark.parametrize("style", DecayStyle)
def test_samples_of_equal_batches_give_the_rates_of_iterations(style: DecayStyle) -> None:
    section = ScheduleSection(lr_decay_style=style, lr_warmup_samples=80, lr_decay_samples=880, min_lr=0.1)
    by_samples, by_iterations = resolve(section, ITERS, 1.0), schedule(style)
    for iteration in range(1, 201):
        assert by_samples.at(iteration, 8 * iteration) == pytest.approx(by_iterations.at(iteration, 0), rel=1e-12)


def test_defaults_in_samples_are_those_of_iterations() -> None:
    found = resolve(ScheduleSection(lr_decay_style=DecayStyle.wsd), RunLength(100, 800, True, 8), 1.0)
    assert (found.warmup, found.decay, found.wsd_decay) == (80, 800, 80)
    assert resolve(ScheduleSection(), RunLength(5, 40, True, 8), 1.0).warmup == 20
