"""Copies checkpoints to a store, from a store, and between stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.format.names import HOST, MANIFEST, OPTIMIZER_DROPPED
from reprise.loading.reader import Checkpoint, open_checkpoint, read_content, read_places
from reprise.loading.verify import verify_share
from reprise.management.paths import all_checkpoints
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.storage.atomic import make_folders, sync_folders
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import is_iteration_name, iteration_of, shown_name
from reprise.storage.paths import exists, lexists
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.locations import files_of, is_stored, location
from reprise.stores.path import url_of
from reprise.stores.store import CHILD_CLIENT
from reprise.stores.upload import Upload, retried

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
        if path != from_path and iteration_of(path) is None:  # a superseded iteration
            continue
        is_named = is_iteration_name(to_path.name) and path == from_path
        to = to_path if is_named else to_path / shown_name(path) if path != from_path else to_path / path.name
        results.append(_Copy(path, to, progress).run())
    return tuple(results)


class _Copy:
    """Copies one checkpoint."""

    def __init__(self, source: Path, target: Path, progress: ProgressCallback) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._checkpoint = open_checkpoint(source, files_of(source))
        if not self._checkpoint.is_whole or self._checkpoint.host is not None:
            raise CheckpointError(
                "A folder holds the part of one host", where=source, found=HOST, fix="Join the hosts: `gather`."
            )
        self._files = CheckpointFiles.at(source)
        self._copied = 0
        self._name = shown_name(source)

    def run(self) -> CopiedCheckpoint:
        """Copy the files missing at the target, and verify."""
        total = self._files.total_bytes
        self._progress(self._name, 0, total)
        if not self._is_there():
            if is_stored(self._target):
                self._upload()
            else:
                self._download()
        return CopiedCheckpoint(str(self._source), str(self._target), total, self._copied)

    def _is_there(self) -> bool:
        """Return whether the target has the checkpoint. Refuse another checkpoint with its name."""
        if not exists(self._target / MANIFEST):
            if not is_stored(self._target) and lexists(self._target):
                raise CheckpointError("A folder has the name of the copy", where=self._target)
            return False
        is_lighter = exists(self._target / OPTIMIZER_DROPPED) and OPTIMIZER_DROPPED not in self._files.sizes
        if is_lighter or read_content(self._target / MANIFEST, files_of(self._target)) != self._files.manifest:
            raise CheckpointError(
                "Another checkpoint has the name of the copy",
                where=self._target,
                found="one without optimizer state" if is_lighter else None,
                fix="Delete it, or name another target.",
            )
        return True

    def _add(self, count: int) -> None:
        self._copied += count
        self._progress(self._name, self._copied, self._files.total_bytes)

    def _upload(self) -> None:
        """Upload to a store through this host's child process."""
        if not is_stored(self._source):
            _verify(self._checkpoint)
        upload = Upload(CHILD_CLIENT, url_of(self._target), self._source)
        names = retried(upload.begin)
        if names is not None:
            for name in names:
                retried(partial(upload.send, name))
                self._add(self._files.sizes[name])
            retried(upload.commit)
        if is_stored(self._source):  # both sides are remote: read the copy back
            _verify(open_checkpoint(self._target, files_of(self._target)))

    def _download(self) -> None:
        """Write to a hidden folder beside the target, verify it, and rename it."""
        partial = self._target.with_name(f".{self._target.name}.{self._files.digest}.copy.partial")
        files = FILE_SYSTEM
        make_folders(files, partial)
        for name, size in sorted(self._files.sizes.items()):
            path = partial / name
            make_folders(files, path.parent)
            if not exists(path) or path.stat().st_size != size:
                self._fetch(name, size, path)
        files.write_whole(partial / MANIFEST, self._files.manifest)
        try:
            _verify(open_checkpoint(partial, files))
        except CheckpointError:
            files.remove_tree(partial)  # an interrupted copy may have left the damaged file: the next copy starts over
            raise
        sync_folders(files, partial)
        files.rename(partial, self._target)
        files.sync_folder(self._target.parent)

    def _fetch(self, name: str, size: int, path: Path) -> None:
        """Copy a file. Until its end, it is shorter than `size`."""
        source = files_of(self._source)
        reading, writing = source.open_for_reading(self._source / name), FILE_SYSTEM.write_new(path, b"")
        try:
            for offset in range(0, size, _COPY_BYTES):
                part = memoryview(bytearray(min(_COPY_BYTES, size - offset)))
                if source.read(reading, part, offset=offset) != part.nbytes:
                    raise CheckpointError("A file ended early", where=self._source / name, expected=f"{size} B")
                FILE_SYSTEM.write(writing, part, offset=offset)
                self._add(part.nbytes)
            FILE_SYSTEM.sync(writing)
        finally:
            FILE_SYSTEM.close(writing)
            source.close(reading)


def _verify(checkpoint: Checkpoint) -> None:
    verify_share(checkpoint, read_places(checkpoint), rank=0, world_size=1)
