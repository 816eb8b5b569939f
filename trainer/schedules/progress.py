"""A run's progress in integers: a resume needs nothing else besides the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from reprise.format import FORMAT
from reprise.storage import Json, finite_number, integer


@dataclass(frozen=True, slots=True)
class Progress:
    """Finished iterations, the samples and tokens they consumed, and the validation loss.

    Args:
        best_loss: Lowest validation loss so far. None before the first evaluation.
        valid_loss: This iteration's validation loss. None if it was not evaluated or the loss was not finite.
        owes_evaluation: Whether the evaluation after this iteration was interrupted. The resumed run does it first.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    best_loss: float | None = None
    valid_loss: float | None = None
    owes_evaluation: bool = False

    def after_iteration(self, samples: int, tokens: int) -> Progress:
        """Return the progress after an iteration with these sample and token counts."""
        return Progress(
            self.iteration + 1, self.consumed_samples + samples, self.consumed_tokens + tokens, self.best_loss
        )

    def after_evaluation(self, loss: float) -> Progress:
        """Return the progress after an evaluation. A nonfinite loss never becomes the best."""
        best = self.best_loss
        if math.isfinite(loss) and (best is None or loss < best):
            best = loss
        valid_loss = loss if math.isfinite(loss) else None
        return replace(self, best_loss=best, valid_loss=valid_loss, owes_evaluation=False)

    def record(self) -> dict[str, object]:
        """Return the progress as `trainer_state.json` members."""
        return asdict(self)

    def state_record(self, lr: float, description: Json) -> Json:
        """Return the complete `trainer_state.json`.

        Args:
            lr: The last iteration's learning rate.
            description: The constant part of the run's record.
        """
        return {"format": FORMAT, **self.record(), "lr": lr, **description}

    @staticmethod
    def from_record(record: Mapping[str, object]) -> Progress:
        """Return the progress from a `trainer_state.json`."""
        return Progress(
            integer(record["iteration"]),
            integer(record["consumed_samples"]),
            integer(record["consumed_tokens"]),
            _loss(record["best_loss"]),
            _loss(record.get("valid_loss")),
            record.get("owes_evaluation") is True,
        )


def _loss(value: object) -> float | None:
    return None if value is None else finite_number(value)
