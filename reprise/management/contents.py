"""Shows a checkpoint's content without reading its tensors."""

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
    """A checkpoint file: its name in the checkpoint folder, and its size in bytes."""

    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor in a checkpoint.

    Args:
        dtype: Safetensors' dtype name, such as `BF16`.
        shape: The whole tensor's shape.
        total_bytes: Its size in bytes.
        file: Its file name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    total_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """A checkpoint's content.

    Args:
        state: The parsed `trainer_state.json`.
        tensors: All tensors in file order.
        aliases: Tied tensors' further names, each with its stored name.
        share: The pieces in the folder, if it is a host's folder.
    """

    path: Path
    iteration: int
    state: Json
    files: tuple[FileSummary, ...]
    tensors: tuple[TensorSummary, ...]
    aliases: Mapping[str, str]
    share: HostShare | None


def show(checkpoint: str | Path) -> CheckpointContents:
    """Return a checkpoint's content.

    Args:
        checkpoint: A checkpoint folder, or a run's folder for its newest checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or its JSON files or headers are damaged.
        UnreadableError: It cannot be read at the moment.
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
