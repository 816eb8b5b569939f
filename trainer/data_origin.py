"""The record of the data in `trainer_state.json`, and where a blend of sources begins after another one. Pure.

A blend is a function of the position since its beginning. When the data of a run changes, the position and the samples
that each source has consumed until then are recorded, so that every source goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from trainer.checkpoint.format.json_file import Json
from trainer.data.blend import Blend
from trainer.data.documents import DocumentMarks
from trainer.data.section import DataSection, SampleCut
from trainer.errors import CheckpointError
from trainer.json_value import integer
from trainer.progress import Progress


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """The beginning of the present data of a run.

    Args:
        position: samples that the run had consumed.
        consumed: samples of each source among them by fingerprint, also of sources that have left.
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
    found: Json = {}
    if len(weights) > 1:
        found["weights"] = {name: str(weights[name]) for name in sorted(weights)}
    if marks is not None:
        found["document_mask"] = "index" if marks.end_of_text is None else marks.end_of_text
    if documents is not None:
        found["documents"] = documents
    if section.samples is not SampleCut.across_documents:
        found |= {"samples": section.samples.value, "micro_batch_size": micro_batch_size}
    return found


def sources_in(state: Json) -> dict[str, Fraction]:
    """Return the share of each source in a state or description, by fingerprint and in the order of the blend.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: if the state is malformed.
    """
    data = state["data"]
    weights = data.get("weights", {data["fingerprint"]: "1"})
    found = {str(name): Fraction(weights[name]) for name in sorted(weights)}
    if min(found.values()) <= 0:
        raise ValueError(f"{weights!r} has a weight that is not positive")
    return found


def origin_after(saved: Json, current: Json, progress: Progress, *, where: object) -> DataOrigin | None:
    """Return where the data of a run begins that resumes from a checkpoint; None if it was and is one source.

    Args:
        saved: `trainer_state.json`.
        current: the description of the run.
        progress: of the resumed run.

    Raises:
        CheckpointError: if the record is malformed.
    """
    data, new = saved.get("data"), sources_in(current)
    if not isinstance(data, Mapping) or "fingerprint" not in data:  # imported, so that nothing is known of its samples
        return None
    try:
        old = sources_in(saved)
        origin = _from_record(saved["blend"]) if "blend" in saved else DataOrigin()
        was, now = (integer(state["batch"]["seq_length"]) for state in (saved, current))
        is_same = (old, was) == (new, now)
        if is_same or (len(old) == len(new) == 1 and not origin.consumed):
            return origin if origin.consumed else None
        counts = Blend(list(old.values())).counts(integer(saved["consumed_samples"]) - origin.position)
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError("A state file has no valid record of its data", where=where, found=repr(error)) from error
    consumed = dict(origin.consumed)
    for name, count in zip(old, counts, strict=True):
        consumed[name] = consumed.get(name, 0) + count
    if was != now:  # the position is converted through tokens, and so are these
        consumed = {name: count * was // now for name, count in consumed.items()}
    return DataOrigin(progress.consumed_samples, consumed)


def _from_record(record: Json) -> DataOrigin:
    return DataOrigin(integer(record["position"]), {str(k): integer(n) for k, n in record["consumed"].items()})
