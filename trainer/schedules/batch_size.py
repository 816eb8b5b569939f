"""The global batch size as a function of the consumed samples: a resume needs no other state. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

_STEP = re.compile(r"(\d+)([kM]?):(\d+)")
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch sizes of a run. Megatron-LM's `--rampup-batch-size` has equal steps.

    The size at its first sample holds for all of an iteration. So a size takes effect at the first iteration at or
    after its border, and no iteration is cut.

    Args:
        steps: (first sample, size) in ascending order; the first begins at sample 0.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return every size once, in ascending order."""
        return tuple(sorted({size for _, size in self.steps}))

    @property
    def last(self) -> int:
        """Return the size from the last border on."""
        return self.steps[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Return the size of the iteration after so many samples."""
        return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1][1]

    def steps_from(self, consumed_samples: int) -> tuple[tuple[int, int], ...]:
        """Return the steps in force from a count of consumed samples on; earlier ones will never be again."""
        return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1 :]

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples consumed by so many iterations, after the samples `consumed` before them."""
        for count, size in self._segments(consumed):
            completed = iterations if count is None else min(count, iterations)
            consumed, iterations = consumed + completed * size, iterations - completed
        return consumed

    def iterations(self, consumed_samples: int, end: int) -> int:
        """Return how many whole iterations fit between two counts of consumed samples, 0 if `end` is passed."""
        total = 0
        for count, size in self._segments(consumed_samples):
            fitting = max(0, end - consumed_samples) // size
            if count is None or fitting < count:
                return total + fitting
            total, consumed_samples = total + count, consumed_samples + count * size
        return total

    def _segments(self, consumed: int) -> Iterator[tuple[int | None, int]]:
        """Yield how many iterations of each size follow, from a count of consumed samples on; None for the last."""
        borders = [*(first for first, _ in self.steps[1:]), None]
        for border, (_, size) in zip(borders, self.steps, strict=True):
            if border is None:
                yield None, size
            elif border > consumed:
                count = -(-(border - consumed) // size)
                yield count, size
                consumed += count * size

    def __str__(self) -> str:
        """Return the schedule as it is written in a configuration, without suffixes."""
        return " ".join(f"{first}:{size}" for first, size in self.steps)


def parse_batch_schedule(text: str) -> BatchSchedule:
    """Return the schedule of a text such as ``0:8 4k:16 16k:32``.

    Args:
        text: `SAMPLES:SIZE` for each size, separated by spaces; k stands for thousand and M for million samples.

    Raises:
        ValueError: with the reason.
    """
    steps = []
    for word in text.split():
        match = _STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not SAMPLES:SIZE, as in 4k:16")
        steps.append((int(match[1]) * _UNITS[match[2]], int(match[3])))
    firsts = [first for first, _ in steps]
    if not steps or firsts[0] != 0:
        raise ValueError("must begin with the size at sample 0, as in 0:8")
    if firsts != sorted(set(firsts)):
        raise ValueError("must be in ascending order of samples")
    if min(size for _, size in steps) < 1:
        raise ValueError("sizes must be at least 1")
    return BatchSchedule(tuple(steps))
