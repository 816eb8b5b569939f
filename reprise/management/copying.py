"""Copies checkpoints to a store, from a store, and between stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.format.names import MANIFEST, OPTIMIZER_DROPPED
from reprise.loading.blocks import verify_tensors
from reprise.loading.reader import open_checkpoint
from reprise.management.paths import all_checkpoints
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.storage.atomic import make_folders, sync_folders
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import is_iteration_name, iteration_of, shown_name
from reprise.storage.paths import exists, lexists
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.locations import files_of, is_stored, location
from reprise.stores.store import CHILD_CLIENT
from reprise.stores.upload import upload

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """A copied checkpoint.

    Args:
        source: The checkpoint's folder or URL.
        target: The copy's folder or URL.
        total_bytes: The size of all its files in bytes.
        copied_bytes: The bytes copied by this call. The rest was there already.
    """

    source: str
    target: str
    total_bytes: int
    copied_bytes: int


def copy(
    source: str | Path, target: str | Path, *, progress: ProgressCallback = ignore_progress
) -> tuple[CopiedCheckpoint, ...]:
    """Copy a checkpoint, or all checkpoints in a run, and verify every byte. An interrupted copy resumes.

    Args:
        source: Folder or URL of a checkpoint or run.
        target: Folder or URL that receives the checkpoints under their names. If its last part is an iteration name, it
            is the copy itself.
        progress: Called with a checkpoint name, the bytes copied so far, and the total.

    Raises:
        ConfigError: A URL is malformed, or the package for stores is missing.
        CheckpointError: A checkpoint is missing, damaged or a single host's part, or the target has another checkpoint
            with its name.
        OSError: A file system or store fails.
    """
    from_path, to_path = location(source), location(target)
    results = []
    for path in all_checkpoints(from_path):
        to = to_path / shown_name(path)
        if path == from_path:
            to = to_path if is_iteration_name(to_path.name) else to_path / path.name
        elif iteration_of(path) is None:  # a superseded iteration
            continue
        results.append(_copy(path, to, progress))
    return tuple(results)


def _copy(source: Path, target: Path, progress: ProgressCallback) -> CopiedCheckpoint:
    """Copy one checkpoint's files missing at the target, and verify."""
    content, copied = CheckpointFiles.at(source), [0]

    def count(size: int) -> None:
        copied.append(copied[-1] + size)
        progress(shown_name(source), copied[-1], content.total_bytes)

    count(0)
    if not _is_there(target, content):
        (_upload if is_stored(target) else _download)(source, target, content, count)
    return CopiedCheckpoint(str(source), str(target), content.total_bytes, copied[-1])


def _is_there(target: Path, content: CheckpointFiles) -> bool:
    """Return whether the target has the checkpoint. Refuse another checkpoint with its name."""
    if not exists(target / MANIFEST):
        if not is_stored(target) and lexists(target):
            raise CheckpointError("A folder has the name of the copy", where=target)
        return False
    is_lighter = exists(target / OPTIMIZER_DROPPED) and OPTIMIZER_DROPPED not in content.sizes
    if is_lighter or files_of(target).read_whole(target / MANIFEST) != content.manifest:
        raise CheckpointError(
            "Another checkpoint has the name of the copy",
            where=target,
            found="one without optimizer state" if is_lighter else None,
            fix="Delete it, or name another target.",
        )
    return True


def _upload(source: Path, target: Path, content: CheckpointFiles, count: Callable[[int], None]) -> None:
    """Upload to a store through this host's child process."""
    if not is_stored(source):
        verify_tensors(open_checkpoint(source, FILE_SYSTEM))
    upload(CHILD_CLIENT, target, source, content, lambda name: count(content.sizes[name]))
    if is_stored(source):  # both sides are remote: read the copy back
        verify_tensors(open_checkpoint(target, files_of(target)))


def _download(source: Path, target: Path, content: CheckpointFiles, count: Callable[[int], None]) -> None:
    """Write to a hidden folder beside the target, verify it, and rename it."""
    partial, files = target.with_name(f".{target.name}.{content.digest}.copy.partial"), FILE_SYSTEM
    make_folders(files, partial)
    for name, size in sorted(content.sizes.items()):
        path = partial / name
        make_folders(files, path.parent)
        if not exists(path) or path.stat().st_size != size:
            _fetch(source / name, path, size, count)
    files.write_whole(partial / MANIFEST, content.manifest)
    try:
        verify_tensors(open_checkpoint(partial, files))
    except CheckpointError:
        files.remove(partial)  # an interrupted copy may have left the damaged file: the next copy starts over
        raise
    sync_folders(files, partial)
    files.rename(partial, target)
    files.sync_folder(target.parent)


def _fetch(source: Path, target: Path, size: int, count: Callable[[int], None]) -> None:
    """Copy a file. Until its end, it is shorter than `size`."""
    files = files_of(source)
    reading, writing = files.open_for_reading(source), FILE_SYSTEM.write_new(target, b"")
    try:
        for offset in range(0, size, _COPY_BYTES):
            part = memoryview(bytearray(min(_COPY_BYTES, size - offset)))
            if files.read(reading, part, offset=offset) != part.nbytes:
                raise CheckpointError("A file ended early", where=source, expected=f"{size} B")
            FILE_SYSTEM.write(writing, part, offset=offset)
            count(part.nbytes)
        FILE_SYSTEM.sync(writing)
    finally:
        FILE_SYSTEM.close(writing)
        files.close(reading)
