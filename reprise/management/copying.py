"""Copies checkpoints to a store, from a store, and between stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from reprise.storage.paths import exists
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.locations import files_of, is_stored, location
from reprise.stores.store import ask
from reprise.stores.url import StoreUrl

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
        self._manifest = read_content(source / MANIFEST, self._checkpoint.files)
        self._files = CheckpointFiles.parse(self._manifest, where=source / MANIFEST)
        if self._checkpoint.is_lightened and exists(source / OPTIMIZER_DROPPED):
            self._files = self._files.without_optimizer()
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
            if not is_stored(self._target) and FILE_SYSTEM.exists(self._target):
                raise CheckpointError("A folder has the name of the copy", where=self._target)
            return False
        is_lighter = exists(self._target / OPTIMIZER_DROPPED) and OPTIMIZER_DROPPED not in self._files.sizes
        if is_lighter or read_content(self._target / MANIFEST, files_of(self._target)) != self._manifest:
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
        url, source = StoreUrl.parse(str(self._target)), str(self._source)
        if not is_stored(self._source):
            _verify(self._checkpoint)
        names = ask(url, "begin", source)
        if names is not None:
            for name in names:
                ask(url, "send", source, name)
                self._add(self._files.sizes[name])
            ask(url, "commit", source)
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
        files.write_whole(partial / MANIFEST, self._manifest)
        try:
            _verify(open_checkpoint(partial, files))
        except CheckpointError:
            files.remove_tree(partial)  # an interrupted copy may have left the damaged file: the next copy starts over
            raise
        sync_folders(files, partial)
        files.rename(partial, self._target)
        files.sync_folder(self._target.parent)

    def _fetch(self, name: str, size: int, path: Path) -> None:
        """Copy a file under a temporary name, and rename it once it is durable."""
        temporary = path.with_name(f".{path.name}.part")
        descriptor, offset = FILE_SYSTEM.write_new(temporary, b""), 0
        try:
            for part in _parts(self._source / name, size):
                FILE_SYSTEM.write(descriptor, [memoryview(part)], offset=offset)
                offset += len(part)
                self._add(len(part))
            FILE_SYSTEM.sync(descriptor)
        finally:
            FILE_SYSTEM.close(descriptor)
        FILE_SYSTEM.rename(temporary, path)


def _verify(checkpoint: Checkpoint) -> None:
    verify_share(checkpoint, read_places(checkpoint), rank=0, world_size=1)


def _parts(path: Path, size: int) -> Iterator[bytes]:
    """Yield a file's or an object's content in parts.

    Raises:
        CheckpointError: It is shorter than `size`.
    """
    files = files_of(path)
    descriptor = files.open_for_reading(path)
    try:
        for offset in range(0, size, _COPY_BYTES):
            data = bytearray(min(_COPY_BYTES, size - offset))
            if files.read(descriptor, memoryview(data), offset=offset) != len(data):
                raise CheckpointError("A file ended early", where=path, expected=f"{size} B")
            yield bytes(data)
    finally:
        files.close(descriptor)
