"""Where the sources of a blend go on after a change."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from reprise.errors import CheckpointError
from tests.messages import refused
from trainer.data.blend import Blend
from trainer.data.section import DataPosition
from trainer.record.data_origin import DataOrigin, origin_after
from trainer.schedules.progress import Progress


def state(consumed: int = 0, *, seq_length: int = 8, **weights: str) -> Any:
    """Return the members of a state that the origin depends on; one weight is data without a list."""
    data: dict[str, object] = {"fingerprint": "all" if len(weights) > 1 else next(iter(weights))}
    if len(weights) > 1:
        data["weights"] = weights
    return {"consumed_samples": consumed, "data": data, "batch": {"seq_length": seq_length}}


def after(saved: Any, current: Any, position: int, begin: DataPosition = DataPosition.run) -> DataOrigin | None:
    return origin_after(saved, current, Progress(consumed_samples=position), where="here", position=begin)


def test_the_same_data_need_no_origin() -> None:
    saved = state(100, a="1/3", b="2/3")
    assert after(saved, state(a="1/3", b="2/3"), 100) is None
    assert after(state(100, a="1"), state(a="1"), 100) is None
    assert after(state(100, a="1"), state(b="1"), 100) is None  # the position goes on, as without blends


def test_counts_are_added_from_change_to_change() -> None:
    saved = state(100, a="1/3", b="2/3")
    first = after(saved, state(a="1/2", c="1/2"), 100)
    counts = Blend([Fraction(1, 3), Fraction(2, 3)]).counts(100)
    assert first == DataOrigin(100, {"a": counts[0], "b": counts[1]})
    assert first.of(["a", "c"]) == [counts[0], 0]
    saved = {**state(160, a="1/2", c="1/2"), "blend": first.record()}
    assert after(saved, state(a="1/2", c="1/2"), 160) == first
    second = after(saved, state(b="1"), 160)
    assert second == DataOrigin(160, {"a": counts[0] + 30, "b": counts[1], "c": 30})
    third = after({**state(170, b="1"), "blend": second.record()}, state(c="1"), 170)
    assert third == DataOrigin(170, {"a": counts[0] + 30, "b": counts[1] + 10, "c": 30})


def test_a_start_is_recorded_at_the_change_and_acts_once() -> None:
    start = DataPosition.start
    first = after(state(100, a="1"), state(b="1"), 100, start)
    assert first == DataOrigin(100, {"a": 100})
    assert first.of(["b"]) == [0]
    saved = {**state(130, b="1"), "blend": first.record()}
    for begin in DataPosition:
        assert after(saved, state(b="1"), 130, begin) == first
    assert after(saved, state(c="1"), 130, start) == DataOrigin(130, {"a": 100, "b": 30})
    back = after(saved, state(a="1"), 130, start)
    assert back is not None
    assert back.of(["a"]) == [100]  # no sample comes twice in an epoch
    assert after(state(100, a="1"), state(a="1"), 100, start) is None
    assert after(state(100, a="1"), state(a="1", seq_length=16), 50, start) is None


def test_imported_data_begin_at_their_start_where_asked() -> None:
    saved: Any = {"consumed_samples": 100, "batch": {"seq_length": 8}}
    origin = after(saved, state(a="1"), 100, DataPosition.start)
    assert origin == DataOrigin(100)
    assert after({**state(120, a="1"), "blend": origin.record()}, state(a="1"), 120) == origin


def test_another_length_converts_counts_through_tokens() -> None:
    saved = state(100, a="1/4", b="3/4")
    found = after(saved, state(seq_length=16, a="1/4", b="3/4"), 50)
    assert found == DataOrigin(50, {"a": 12, "b": 37})


def test_nothing_is_known_of_imported_samples() -> None:
    saved = {"consumed_samples": 100, "batch": {"seq_length": 8}}
    assert after(saved, state(a="1/2", b="1/2"), 100) is None


WEIGHTS = ({"a": "1/0"}, {"a": float("inf")}, [1])
BLENDS: tuple[object, ...] = ({"position": -1, "consumed": {}}, {"position": 1, "consumed": [1]})


@pytest.mark.parametrize(
    "change",
    [
        *({"data": {"fingerprint": "all", "weights": weights}} for weights in WEIGHTS),
        *({"blend": blend} for blend in BLENDS),
        {"consumed_samples": None},
    ],
)
def test_a_malformed_record_is_refused(change: dict[str, object]) -> None:
    saved = {**state(100, a="1/4", b="3/4"), **change}
    with refused(CheckpointError, "here"):
        after(saved, state(a="1/2", b="1/2"), 100)
