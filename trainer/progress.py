"""How far a run has come, in integers: all that a resume needs besides the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Finished iterations, the samples and tokens they consumed, and the best validation loss (None before one)."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    best_loss: float | None = None

    def after_iteration(self, samples: int, tokens: int) -> Progress:
        """Return the progress after one more iteration of so many samples and tokens."""
        return Progress(
            self.iteration + 1, self.consumed_samples + samples, self.consumed_tokens + tokens, self.best_loss
        )

    def after_evaluation(self, loss: float) -> Progress:
        """Return the progress after an evaluation; a loss that is no number never becomes the best."""
        best = self.best_loss
        if math.isfinite(loss) and (best is None or loss < best):
            best = loss
        return Progress(self.iteration, self.consumed_samples, self.consumed_tokens, best)

    def record(self) -> dict[str, object]:
        """Return the members of `trainer_state.json` that hold it."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "best_loss": self.best_loss,
        }

    @staticmethod
    def from_record(record: Mapping[str, object]) -> Progress:
        """Return the progress that a `trainer_state.json` holds."""
        best = record["best_loss"]
        return Progress(
            _integer(record["iteration"]),
            _integer(record["consumed_samples"]),
            _integer(record["consumed_tokens"]),
            None if best is None else float(str(best)),
        )


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value
