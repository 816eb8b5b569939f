"""Makes a whole checkpoint of the folders of several hosts."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.format.names import HOST
from reprise.loading.choose import LoadSource, no_folder
from reprise.loading.reader import Checkpoint, read_places
from reprise.local.join import join, newest_complete, open_parts
from reprise.management.paths import TERMS
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.paths import exists, is_dir
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, FolderTerms
from reprise.storage.lock import FolderLock

_ATTEMPT = "gather-"  # what the names of these attempts begin with


@dataclass(frozen=True, slots=True)
class GatherSource:
    """A local checkpoint, and the bytes copied from it."""

    path: Path
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class GatherReport:
    """A checkpoint made of the folders of hosts.

    Args:
        path: the folder of the whole checkpoint.
        total_bytes: the size of its tensors, in bytes.
        sources: its local checkpoints.
        damage: descriptions of damaged blocks, which were copied from another folder.
    """

    path: Path
    iteration: int
    total_bytes: int
    sources: tuple[GatherSource, ...]
    damage: tuple[str, ...]


def gather(
    hosts: Iterable[str | Path],
    out: str | Path,
    *,
    iteration: int | None = None,
    progress: ProgressCallback = ignore_progress,
    terms: FolderTerms = TERMS,
) -> GatherReport:
    """Join the folders of several hosts into a single folder with the whole checkpoint.

    The output is locked meanwhile. The checkpoint appears there complete or not at all.

    Args:
        hosts: each host's folder of local checkpoints, or a checkpoint in it.
        out: the folder to write the checkpoint's folder to; it is made if it is missing.
        iteration: by default the newest checkpoint whole among them.
        progress: is called with the name of the checkpoint, the bytes written, and all bytes to write.
        terms: the names of the caller's settings in advice.

    Raises:
        CheckpointError: if a folder is missing, `out` is the folder of a host or has the iteration already, or pieces
            are missing, which are named by their host.
        LockError: if a run saves to `out`.
    """
    parts = list[Checkpoint]()
    for path in (Path(host).absolute() for host in hosts):
        if not is_dir(path):
            raise no_folder(path)
        parts += open_parts(LoadSource.named(path).path, FILE_SYSTEM)
    parts = newest_complete(parts, iteration)
    folder = CheckpointFolder(Path(out), FILE_SYSTEM, terms)
    _refuse_host_folder(folder)
    lock = FolderLock(folder.root, secrets.token_hex(4), files=folder.files)
    with lock, lock:
        for number, attempt in folder.partials():  # of a call that was killed
            if attempt.startswith(_ATTEMPT):
                folder.files.remove_tree(folder.partial(number, attempt))
        return _join(parts, folder, progress)


def _join(parts: list[Checkpoint], out: CheckpointFolder, progress: ProgressCallback) -> GatherReport:
    total = sum(place.spec.total_bytes for place in read_places(parts[0]).values())
    name, count = out.iteration(parts[0].iteration).name, 0

    def add(new_bytes: int) -> None:
        nonlocal count
        count += new_bytes
        progress(name, count, total)

    progress(name, 0, total)
    joined = join(parts, out, attempt=f"{_ATTEMPT}{secrets.token_hex(4)}", progress=add)
    sources = tuple(GatherSource(part.path, joined.taken_bytes[part.path]) for part in parts)
    return GatherReport(joined.path, parts[0].iteration, total, sources, tuple(joined.damage))


def _refuse_host_folder(out: CheckpointFolder) -> None:
    """Refuse a folder of local checkpoints: a run would take a whole checkpoint there for damaged."""
    for iteration in out.committed():
        if exists(out.iteration(iteration) / HOST):
            raise CheckpointError(
                "The output is the folder of a host",
                where=out.iteration(iteration) / HOST,
                fix=f"Name {out.terms.another}.",
            )
