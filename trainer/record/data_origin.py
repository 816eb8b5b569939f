"""The data record in `trainer_state.json`, and where a blend continues after another. Pure.

A blend depends on the position since its start. When a run's data changes, the position and each source's consumed
samples are recorded, so every source continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from reprise.errors import CheckpointError
from reprise.storage import Json, integer
from trainer.data.blend import Blend
from trainer.data.section import DataPosition
from trainer.schedules.progress import Progress


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """Where a run's present data starts.

    Args:
        position: Samples consumed by the run.
        consumed: Samples consumed per source among them, by fingerprint, including former sources.
    """

    position: int = 0
    consumed: Mapping[str, int] = field(default_factory=dict)

    def of(self, fingerprints: Sequence[str]) -> list[int]:
        """Return the consumed samples for each source."""
        return [self.consumed.get(name, 0) for name in fingerprints]

    def record(self) -> Json:
        """Return the `blend` member for `trainer_state.json`."""
        return {"position": self.position, "consumed": dict(sorted(self.consumed.items()))}


@contextmanager
def reading_state(what: str, where: object) -> Iterator[None]:
    """Report a malformed part of a state file.

    Raises:
        CheckpointError: The block reads a malformed value.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"A state file has no valid {what}", where=where, found=repr(error)) from error


def sources_in(state: Json) -> dict[str, Fraction]:
    """Return each source's share in a state or description, by fingerprint and in blend order.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: The state is malformed.
    """
    data = state["data"]
    weights = data.get("weights", {data["fingerprint"]: "1"})
    return {str(name): Fraction(weights[name]) for name in sorted(weights)}


def origin_after(
    saved: Json,
    current: Json,
    progress: Progress,
    *,
    where: object,
    position: DataPosition = DataPosition.run,
) -> DataOrigin | None:
    """Return where a resumed run's data starts.

    None if it continues at the run's position: the sources are those from the run's start, or a source replaced
    another.

    Args:
        saved: The content of `trainer_state.json`.
        current: The run's description.
        progress: The resumed run's progress.
        where: The place to name in errors.
        position: Where a source starts after replacing another. No effect if the sources are the same.

    Raises:
        CheckpointError: The record is malformed.
    """
    data, new = saved.get("data"), sources_in(current)
    if not isinstance(data, Mapping) or "fingerprint" not in data:  # imported: its samples are unknown
        return DataOrigin(progress.consumed_samples) if position is DataPosition.start else None
    with reading_state("record of its data", where):
        old = sources_in(saved)
        recorded = _from_record(saved["blend"]) if "blend" in saved else None
        origin = recorded or DataOrigin()
        was, now = (integer(state["batch"]["seq_length"]) for state in (saved, current))
        keeps_position = position is DataPosition.run or old == new
        if (old, was) == (new, now) or (recorded is None and len(old) == len(new) == 1 and keeps_position):
            return recorded
        counts = Blend(list(old.values())).counts(integer(saved["consumed_samples"]) - origin.position)
    consumed = dict(origin.consumed)
    for name, count in zip(old, counts, strict=True):
        consumed[name] = consumed.get(name, 0) + count
    if was != now:  # the position is converted through tokens, and so are these
        consumed = {name: count * was // now for name, count in consumed.items()}
    return DataOrigin(progress.consumed_samples, consumed)


def _from_record(record: Json) -> DataOrigin:
    return DataOrigin(integer(record["position"]), {str(k): integer(n) for k, n in record["consumed"].items()})
