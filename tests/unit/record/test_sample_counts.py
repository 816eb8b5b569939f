"""Saved counts of samples, as samples of another length."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.record.compatibility import differences
from trainer.record.resume_rules import RULES, compared
from trainer.record.run_record import saved_progress
from trainer.record.sample_counts import in_samples_of
from trainer.schedules.progress import Progress


def state(schedule: object, **batch: object) -> Any:
    return {"iteration": 3, "schedule": schedule, "batch": {"seq_length": 16, **batch}}


def test_samples_are_converted_and_iterations_are_not() -> None:
    saved = state({"style": "cosine", "lr": 1.0, "warmup_samples": 5, "decay_samples": 60}, batch_schedule="0:4 13:8")
    found = in_samples_of(32, saved)
    assert found["schedule"] == {"style": "cosine", "lr": 1.0, "warmup_samples": 2, "decay_samples": 30}
    assert found["batch"] == {"seq_length": 16, "batch_schedule": "0:4 6:8"}
    assert in_samples_of(16, saved) is saved
    saved = state({"warmup_iters": 5, "decay_iters": 60}, global_batch_size=8)
    assert in_samples_of(8, saved) == saved


@pytest.mark.parametrize("saved", [{}, state(7), state({"decay_samples": "60"}, batch_schedule="x"), {"batch": 3},
                                   {"batch": {"seq_length": "16"}}, {"batch": {"seq_length": 0}}])  # fmt: skip
def test_a_malformed_state_stays_as_it_is(saved: Any) -> None:
    assert in_samples_of(32, saved) == saved
    assert in_samples_of(None, saved) == saved


def test_an_evaluation_is_owed_at_another_length_too() -> None:
    progress = Progress(3, 10, 160, best_loss=2.0, owes_evaluation=True)
    saved = {**progress.record(), "batch": {"seq_length": 16}}
    found = saved_progress(saved, seq_length=32, where="here")
    assert found == Progress(3, 5, 160, best_loss=2.0, owes_evaluation=True)


def test_a_run_of_another_length_is_compared_in_its_own_samples() -> None:
    saved = state({"decay_samples": 60}, batch_schedule="0:4 12:8")
    current = {
        "optimizer": {},
        "schedule": {"decay_samples": 30},
        "batch": {"seq_length": 32, "batch_schedule": "0:4 6:8"},
    }
    (found,) = differences(*compared(saved, current), RULES)
    assert (found.field, found.saved, found.current) == ("batch.seq_length", 16, 32)
