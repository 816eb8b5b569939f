"""Shows the content of a checkpoint without reading its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reprise.loading.reader import read_places
from reprise.management.host_share import HostShare, share_of
from reprise.management.paths import open_newest
from reprise.storage.json_file import Json


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A file of a checkpoint, by its name in the checkpoint's folder, and its size in bytes."""

    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor of a checkpoint.

    Args:
        dtype: as safetensors names it, such as `BF16`.
        shape: of the whole tensor.
        total_bytes: its size in bytes.
        file: the name of its file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    total_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The content of a checkpoint.

    Args:
        state: its `trainer_state.json`.
        tensors: in the order in which they lie in the files.
        aliases: further names of tied tensors, and the name under which each is stored.
        share: the pieces in the folder, if it is the folder of one host.
    """

    path: Path
    iteration: int
    state: Json
    files: tuple[FileSummary, ...]
    tensors: tuple[TensorSummary, ...]
    aliases: Mapping[str, str]
    share: HostShare | None


def show(checkpoint: str | Path) -> CheckpointContents:
    """Return the content of a checkpoint.

    Args:
        checkpoint: its folder, or a run's for its newest.

    Raises:
        CheckpointError: if there is no checkpoint, or its JSON files or headers are damaged.
        UnreadableError: if it cannot be read at the moment.
    """
    stored = open_newest(checkpoint)
    places = sorted(read_places(stored).values(), key=lambda place: (place.file, place.offset))
    return CheckpointContents(
        path=stored.path,
        iteration=stored.iteration,
        state=stored.state,
        files=tuple(FileSummary(name, entry.total_bytes) for name, entry in stored.manifest.files.items()),
        tensors=tuple(
            TensorSummary(place.spec.name, place.spec.dtype.name, place.spec.shape, place.spec.total_bytes, place.file)
            for place in places
        ),
        aliases=dict(stored.manifest.aliases),
        share=share_of(stored),
    )
