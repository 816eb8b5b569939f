"""How far a run has come."""

from __future__ import annotations

import math

import pytest

from trainer.schedules.progress import Progress


def test_iterations_add_samples_and_tokens() -> None:
    progress = Progress().after_iteration(8, 1024).after_iteration(8, 1024)
    assert progress == Progress(2, 16, 2048, None)


def test_only_a_better_number_becomes_the_best_loss() -> None:
    progress = Progress()
    for loss, best in [(math.nan, None), (math.inf, None), (3.0, 3.0), (4.0, 3.0), (math.nan, 3.0), (2.0, 2.0)]:
        progress = progress.after_evaluation(loss)
        assert progress.best_loss == best


@pytest.mark.parametrize("broken", [{"iteration": "7"}, {"consumed_samples": 1.5}, {"consumed_tokens": None}])
def test_a_record_that_holds_no_integer_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        Progress.from_record({**Progress().record(), **broken})
    with pytest.raises(KeyError):
        Progress.from_record({})
