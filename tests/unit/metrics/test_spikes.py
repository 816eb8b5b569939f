"""Spikes above the running median: what counts as one, and that a resumed run finds the same."""

from __future__ import annotations

import json
import math
import random

import pytest

from trainer.metrics.spikes import SpikeWatch


def noisy(count: int, seed: int = 1) -> list[tuple[float, float]]:
    source = random.Random(seed)
    return [(source.gauss(2.5, 0.1), source.gauss(1.0, 0.2)) for _ in range(count)]


def spikes(watch: SpikeWatch, values: list[tuple[float, float]]) -> list[str]:
    found = [watch.add(number, *pair) for number, pair in enumerate(values)]
    return [f"{spike.iteration} {spike.figure}" for spike in found if spike is not None]


def test_noise_is_no_spike_and_a_jump_of_either_figure_is() -> None:
    assert spikes(SpikeWatch(6.0, 32), noisy(1000)) == []
    values = noisy(100)
    values[20], values[50], values[80] = (9.0, 1.0), (3.7, 1.0), (2.5, 4.0)
    assert spikes(SpikeWatch(6.0, 32), values) == ["50 loss", "80 grad_norm"]  # 20 is before the window is full


def test_falling_values_and_a_flat_curve_are_no_spikes() -> None:
    assert spikes(SpikeWatch(6.0, 8), [(0.1, 0.01)] * 3 + noisy(4) + [(-5.0, 0.0)]) == []
    assert spikes(SpikeWatch(2.0, 4), [(1.0, 1.0)] * 9 + [(1.019, 1.0)]) == []
    assert spikes(SpikeWatch(2.0, 4), [(1.0, 1.0)] * 9 + [(1.021, 1.0)]) == ["9 loss"]


def test_a_nonfinite_value_is_a_spike_and_no_part_of_the_median() -> None:
    watch = SpikeWatch(6.0, 4)
    values = [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), *[(1.0, 1.0)] * 4, (2.0, 1.0)]
    assert spikes(watch, values) == ["1 loss", "2 grad_norm", "7 loss"]
    assert all(map(math.isfinite, watch.record()["loss"]))


def test_a_resumed_watch_finds_what_the_first_finds() -> None:
    values = noisy(60)
    values[45] = (2.5, 3.0)
    whole, watch = SpikeWatch(6.0, 32), SpikeWatch(6.0, 32)
    expected = [whole.add(number, *pair) for number, pair in enumerate(values)]
    found = []
    for number, pair in enumerate(values):
        if number % 7 == 3:
            watch.rewound.append((number, number + 5))
            record, watch = json.loads(json.dumps(watch.record())), SpikeWatch(6.0, 32)
            watch.resume(record)
        found.append(watch.add(number, *pair))
    assert found == expected
    assert watch.rewound == [(number, number + 5) for number in range(3, 60, 7)]
    assert watch.record() | {"rewound": []} == whole.record()


@pytest.mark.parametrize("record", [None, {}, {"loss": [1.0], "grad_norm": ["x"], "rewound": []}, {"loss": 3}])
def test_a_malformed_record_is_refused(record: object) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        SpikeWatch(6.0, 4).resume(record)
