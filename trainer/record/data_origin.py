"""The record of the data in `trainer_state.json`, and where a blend of sources begins after another. Pure.

A blend is a function of the position since its beginning. When the data of a run changes, the position and the samples
consumed of each source until then are recorded: every source goes on where it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from reprise.errors import CheckpointError
from reprise.storage import Json, integer
from trainer.data.blend import Blend
from trainer.data.documents import DocumentMarks
from trainer.data.section import DataPosition, DataSection, SampleCut
from trainer.schedules.progress import Progress

# What `str` makes of a Fraction. Fraction itself reads exponents, whose digits take minutes.
_SHARE = re.compile(r"[0-9]+(/[0-9]+)?")


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """The beginning of the present data of a run.

    Args:
        position: samples consumed by the run.
        consumed: samples of each source among them by fingerprint, also of former sources.
    """

    position: int = 0
    consumed: Mapping[str, int] = field(default_factory=dict)

    def of(self, fingerprints: Sequence[str]) -> list[int]:
        """Return the samples consumed of each of these sources."""
        return [self.consumed.get(name, 0) for name in fingerprints]

    def record(self) -> Json:
        """Return the member `blend` of `trainer_state.json`."""
        return {"position": self.position, "consumed": dict(sorted(self.consumed.items()))}


def data_record(
    section: DataSection,
    weights: Mapping[str, Fraction],
    marks: DocumentMarks | None,
    documents: str | None,
    *,
    micro_batch_size: int,
) -> Json:
    """Return the optional members of `data` in a description: of a blend, of document masks, of padded samples.

    Args:
        weights: the share of each source by its fingerprint.
        marks: the documents of `data.document_mask`; None without it.
        documents: the fingerprint of the documents' borders; None where no sample depends on them.
        micro_batch_size: the loss of a micro batch of padded samples is the mean over its targets, so its size is a
            part of their data.
    """
    members: Json = {}
    if len(weights) > 1:
        members["weights"] = {name: str(weights[name]) for name in sorted(weights)}
    if marks is not None:
        members["document_mask"] = "index" if marks.end_of_text is None else marks.end_of_text
    if documents is not None:
        members["documents"] = documents
    if section.samples is not SampleCut.across_documents:
        members |= {"samples": section.samples.value, "micro_batch_size": micro_batch_size}
    return members


def sources_in(state: Json) -> dict[str, Fraction]:
    """Return the share of each source in a state or description, by fingerprint and in the order of the blend.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: if the state is malformed.
    """
    data = state["data"]
    weights = data.get("weights", {data["fingerprint"]: "1"})
    if malformed := [weight for weight in weights.values() if not _SHARE.fullmatch(weight)]:
        raise ValueError(f"{malformed[0]!r} is no weight")
    shares = {str(name): Fraction(weights[name]) for name in sorted(weights)}
    if min(shares.values()) <= 0:
        raise ValueError(f"{weights!r} has a weight that is not positive")
    return shares


def origin_after(
    saved: Json,
    current: Json,
    progress: Progress,
    *,
    where: object,
    position: DataPosition = DataPosition.run,
) -> DataOrigin | None:
    """Return where the data of a resumed run begins.

    None if it goes on at the position of the run: the sources are those of its start, or a source replaced another.

    Args:
        saved: `trainer_state.json`.
        current: the description of the run.
        progress: of the resumed run.
        position: where a source begins after it replaces another; of no effect if the sources are the same.

    Raises:
        CheckpointError: if the record is malformed.
    """
    data, new = saved.get("data"), sources_in(current)
    if not isinstance(data, Mapping) or "fingerprint" not in data:  # imported, so that nothing is known of its samples
        return DataOrigin(progress.consumed_samples) if position is DataPosition.start else None
    try:
        old = sources_in(saved)
        recorded = _from_record(saved["blend"]) if "blend" in saved else None
        origin = recorded or DataOrigin()
        was, now = (integer(state["batch"]["seq_length"]) for state in (saved, current))
        keeps_position = position is DataPosition.run or old == new
        if (old, was) == (new, now) or (recorded is None and len(old) == len(new) == 1 and keeps_position):
            return recorded
        counts = Blend(list(old.values())).counts(integer(saved["consumed_samples"]) - origin.position)
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError("A state file has no valid record of its data", where=where, found=repr(error)) from error
    consumed = dict(origin.consumed)
    for name, count in zip(old, counts, strict=True):
        consumed[name] = consumed.get(name, 0) + count
    if was != now:  # the position is converted through tokens, and so are these
        consumed = {name: count * was // now for name, count in consumed.items()}
    return DataOrigin(progress.consumed_samples, consumed)


def new_source_lines(
    saved: Json, current: Json, origin: DataOrigin | None, consumed_samples: int, files: Sequence[tuple[object, int]]
) -> list[str]:
    """Return a line for each new source of a resumed run: where it begins.

    A run without consumed samples has none.

    Args:
        origin: result of `origin_after`.
        consumed_samples: of the resumed run.
        files: the first file and the number of samples of each source, in the order of the blend.
    """
    data, new = saved.get("data"), sources_in(current)
    old = sources_in(saved) if isinstance(data, Mapping) and "fingerprint" in data else {}
    origin = origin or DataOrigin()
    counts = Blend(list(new.values())).counts(consumed_samples - origin.position)
    lines = []
    for name, count, (path, size) in zip(new, counts, files, strict=True):
        consumed = count + origin.consumed.get(name, 0)
        if name in old or not consumed_samples:
            continue
        if not consumed:
            place = "its first sample"
        else:
            place = f"its sample {consumed % size} of {size} in epoch {consumed // size + 1}"
            place += "" if name in origin.consumed else "; data.position=start begins a new source at its first sample"
        lines.append(f"source {name} ({path}) is new at sample {consumed_samples} of the run and begins at {place}")
    return lines


def _from_record(record: Json) -> DataOrigin:
    return DataOrigin(integer(record["position"]), {str(k): integer(n) for k, n in record["consumed"].items()})
