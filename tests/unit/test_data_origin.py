"""Where the sources of a blend go on after a change."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from trainer.data.blend import Blend
from trainer.data_origin import DataOrigin, origin_after
from trainer.errors import CheckpointError
from trainer.progress import Progress


def state(consumed: int = 0, *, seq_length: int = 8, **weights: str) -> Any:
    """Return the members of a state that the origin depends on; one weight is data without a list."""
    data: dict[str, object] = {"fingerprint": "all" if len(weights) > 1 else next(iter(weights))}
    if len(weights) > 1:
        data["weights"] = weights
    return {"consumed_samples": consumed, "data": data, "batch": {"seq_length": seq_length}}


def after(saved: Any, current: Any, position: int) -> DataOrigin | None:
    return origin_after(saved, current, Progress(consumed_samples=position), where="here")


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


def test_another_length_converts_counts_through_tokens() -> None:
    saved = state(100, a="1/4", b="3/4")
    found = after(saved, state(seq_length=16, a="1/4", b="3/4"), 50)
    assert found == DataOrigin(50, {"a": 12, "b": 37})


def test_nothing_is_known_of_imported_samples() -> None:
    saved = {"consumed_samples": 100, "batch": {"seq_length": 8}}
    assert after(saved, state(a="1/2", b="1/2"), 100) is None


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"fingerprint": "all", "weights": {"a": "0"}}},
        {"data": {"fingerprint": "all", "weights": {"a": "1/0"}}},
        {"data": {"fingerprint": "all", "weights": [1]}},
        {"blend": {"position": -1, "consumed": {}}},
        {"blend": {"position": 1, "consumed": [1]}},
        {"consumed_samples": None},
    ],
)
def test_a_malformed_record_is_refused(change: dict[str, object]) -> None:
    saved = {**state(100, a="1/4", b="3/4"), **change}
    with pytest.raises(CheckpointError, match="no valid record of its data"):
        after(saved, state(a="1/2", b="1/2"), 100)
