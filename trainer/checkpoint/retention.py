"""Which committed checkpoints stay. Pure; deleting is the saver's business."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `max_checkpoint_keep` (0 = all), every multiple of `save_retain_interval` (0 = none), and the
    `keep_best` with the lowest validation loss."""

    max_checkpoint_keep: int = 0
    save_retain_interval: int = 0
    keep_best: int = 0

    def doomed(
        self, committed: Sequence[int], *, pinned: Collection[int] = (), losses: Mapping[int, float] | None = None
    ) -> list[int]:
        """Return the iterations to delete, oldest first; never the newest, never a `pinned` one.

        Iterations that are kept for another reason do not use up the places of the newest ones.

        Args:
            losses: the validation loss of iterations that have one; of equal ones the newest counts as best.
        """
        if self.max_checkpoint_keep <= 0:
            return []
        newest = sorted(committed)[-self.max_checkpoint_keep :]
        known = {iteration: loss for iteration, loss in (losses or {}).items() if iteration in committed}
        best = sorted(known, key=lambda iteration: (known[iteration], -iteration))[: self.keep_best]
        kept = {*newest, *best, *pinned}
        return [
            iteration for iteration in sorted(committed) if iteration not in kept and not self._is_retained(iteration)
        ]

    def _is_retained(self, iteration: int) -> bool:
        return self.save_retain_interval > 0 and iteration % self.save_retain_interval == 0
