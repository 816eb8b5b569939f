"""The global batch size as a function of consumed samples: a resume needs no other state. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

_STEP = re.compile(r"(\d+)([kM]?):(\d+)")
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """A run's global batch sizes. Megatron-LM's `--rampup-batch-size` has equal steps.

    An iteration keeps the size in force at its first sample. So a size takes effect at the first iteration at or after
    its border, and no iteration is cut.

    Args:
        steps: Pairs (first sample, size) in ascending order. The first pair starts at sample 0.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all distinct sizes in ascending order."""
        return tuple(sorted({size for _, size in self.steps}))

    @property
    def last(self) -> int:
        """Return the final size."""
        return self.steps[-1][1]

    def at(self, consumed_samples: int) -> int:
        """Return the size for the iteration starting at this sample count."""
        return self.steps_from(consumed_samples)[0][1]

    def steps_from(self, consumed_samples: int) -> tuple[tuple[int, int], ...]:
        """Return the steps in force from a consumed sample count on, without those already over."""
        return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1 :]

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the consumed samples after `iterations` more iterations, starting from `consumed`."""
        for count, size in self._segments(consumed):
            completed = iterations if count is None else min(count, iterations)
            consumed, iterations = consumed + completed * size, iterations - completed
        return consumed

    def iterations(self, consumed_samples: int, end: int) -> int:
        """Return how many complete iterations fit between two sample counts; 0 if `end` is passed."""
        total = 0
        for count, size in self._segments(consumed_samples):
            fitting = max(0, end - consumed_samples) // size
            if count is None or fitting < count:
                return total + fitting
            total, consumed_samples = total + count, consumed_samples + count * size
        return total

    def _segments(self, consumed: int) -> Iterator[tuple[int | None, int]]:
        """Yield (iteration count, size) per size, from a consumed sample count on. The last count is None."""
        borders = [*(first for first, _ in self.steps[1:]), None]
        for border, (_, size) in zip(borders, self.steps, strict=True):
            if border is None:
                yield None, size
            elif border > consumed:
                count = -(-(border - consumed) // size)
                yield count, size
                consumed += count * size

    def __str__(self) -> str:
        """Return the schedule as written in a configuration, without unit suffixes."""
        return " ".join(f"{first}:{size}" for first, size in self.steps)


def parse_batch_schedule(text: str) -> BatchSchedule:
    """Parse a schedule such as ``0:8 4k:16 16k:32``.

    Args:
        text: `SAMPLES:SIZE` for each size, separated by spaces. The suffix k means thousand samples, M million.

    Raises:
        ValueError: The text is malformed. The message says why.
    """
    steps = []
    for word in text.split():
        match = _STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not SAMPLES:SIZE, as in 4k:16")
        steps.append((int(match[1]) * _UNITS[match[2]], int(match[3])))
    firsts = [first for first, _ in steps]
    if not steps or firsts[0] != 0:
        raise ValueError("must start with the size at sample 0, as in 0:8")
    if firsts != sorted(set(firsts)):
        raise ValueError("must be in ascending order of samples")
    if min(size for _, size in steps) < 1:
        raise ValueError("sizes must be at least 1")
    return BatchSchedule(tuple(steps))
