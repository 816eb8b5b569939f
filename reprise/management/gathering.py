"""Joins several hosts' folders into a whole checkpoint: copies their parts, and checks every block."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import Parts
from reprise.format.names import HOST, MANIFEST
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places, tensor_bytes
from reprise.local.parts import candidates
from reprise.local.pieces import PieceWriter, read_blocks
from reprise.local.skeleton import skeleton_of, write_skeleton
from reprise.management.paths import checkpoint_folder
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.storage.atomic import sync_folders
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, is_iteration_name, require_vacant
from reprise.storage.lock import FolderLock
from reprise.storage.paths import exists

_log = logging.getLogger(__name__)

_ATTEMPT = "gather-"  # prefix for these attempts' names
_Part = tuple[Checkpoint, Parts]


@dataclass(frozen=True, slots=True)
class GatherSource:
    """A local checkpoint, and the bytes copied from it."""

    path: Path
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class GatherReport:
    """A checkpoint joined from hosts' folders.

    Args:
        path: The whole checkpoint's folder.
        total_bytes: Its tensors' size in bytes.
        sources: Its local checkpoints.
        damage: Descriptions of damaged blocks, which were copied from another folder.
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
) -> GatherReport:
    """Join several hosts' folders into a single folder with the whole checkpoint.

    The output is locked meanwhile. The checkpoint appears there complete or not at all.

    Args:
        hosts: Each host's folder for local checkpoints, or a checkpoint in it.
        out: The folder that receives the checkpoint folder. It is created if missing.
        iteration: The iteration to join. None means the newest that is whole among the folders.
        progress: Called with the checkpoint name, the bytes written, and the total.

    Raises:
        CheckpointError: A folder is missing, `out` already has the iteration, parts are missing (named by host), or a
            block is damaged in every folder.
        LockError: A run is saving to `out`.
    """
    parts = _newest_whole([part for host in hosts for part in _parts_in(Path(host).absolute())], iteration)
    folder = CheckpointFolder(Path(out), FILE_SYSTEM)
    lock = FolderLock(folder.root, secrets.token_hex(4))
    with lock, lock:
        for number, attempt in folder.partials():  # left by a killed call; others may be a copy under way
            if attempt.startswith(_ATTEMPT):
                folder.files.remove(folder.partial(number, attempt))
        return _join(parts, folder, progress)


def _parts_in(host: Path) -> list[_Part]:
    """Return the local checkpoints in a host's folder, or the one at this path.

    Damaged checkpoints, and checkpoints that belong to no single host, are logged and skipped.
    """
    path = checkpoint_folder(host)
    if is_iteration_name(path.name) or exists(path / MANIFEST):
        return [_open(path)]
    folder, parts = CheckpointFolder(path, FILE_SYSTEM), list[_Part]()
    for iteration in folder.committed():
        try:
            parts.append(_open(folder.iteration(iteration)))
        except TrainerError as error:
            _log.error("%s is left out: %s", folder.iteration(iteration), error)
    return parts


def _open(path: Path) -> _Part:
    checkpoint = open_checkpoint(path, FILE_SYSTEM)
    read_places(checkpoint)
    if checkpoint.host is None:
        raise CheckpointError("A checkpoint is not that of one host", where=path, expected=HOST, found="all pieces")
    return checkpoint, checkpoint.host.parts


def _newest_whole(parts: Sequence[_Part], iteration: int | None) -> list[_Part]:
    """Return the folders' parts for the given iteration, or for the newest one that is whole among them.

    Raises:
        CheckpointError: Names the hosts whose parts are missing.
    """
    lacking = list[str]()
    for candidate in candidates([{checkpoint.iteration: members} for checkpoint, members in parts]):
        if iteration in (None, candidate.iteration):
            if not candidate.problem:
                for problem in lacking:
                    _log.warning("%s; an older one is whole", problem)
                return [parts[number] for number in sorted(candidate.folders)]
            lacking.append(candidate.problem)
    raise CheckpointError(
        "No checkpoint is whole in these folders together",
        expected=None if iteration is None else f"iteration {iteration}",
        found="; ".join(lacking) or "no part of it",
        fix="Name the folders of the other hosts too, or of hosts that have copies of these parts.",
    )


def _join(parts: Sequence[_Part], out: CheckpointFolder, progress: ProgressCallback) -> GatherReport:
    first, attempt, damage = parts[0][0], f"{_ATTEMPT}{secrets.token_hex(4)}", list[str]()
    assert first.host is not None
    target, partial = out.iteration(first.iteration), out.partial(first.iteration, attempt)
    require_vacant(target)
    total, copied_bytes = tensor_bytes(first), Counter[Path]()

    def count(path: Path, size: int) -> None:
        copied_bytes[path] += size
        progress(target.name, copied_bytes.total(), total)

    count(first.path, 0)
    try:
        with out.writing("The output"):
            write_skeleton(partial, skeleton_of(first), out.files, is_whole=True)
            with contextlib.closing(PieceWriter(replace(first, path=partial))) as writer:
                for number, pieces in first.host.by_host(first.host.pieces).items():
                    holders = [part for part, members in parts if number in members.whole]
                    damage += _copy(holders, blocks_of(first, pieces), writer, count)
                writer.sync()
            sync_folders(out.files, partial)
            out.commit(first.iteration, attempt)
    finally:
        with contextlib.suppress(OSError):  # the original error matters more
            out.files.remove(partial)
    sources = tuple(GatherSource(part.path, copied_bytes[part.path]) for part, _ in parts)
    return GatherReport(target, first.iteration, total, sources, tuple(damage))


def _copy(
    holders: Sequence[Checkpoint],
    blocks: Iterable[PieceBlock],
    writer: PieceWriter,
    count: Callable[[Path, int], None],
) -> list[str]:
    """Copy a host's part from the first folder holding it, and damaged blocks from the next. Return their descriptions.

    Args:
        count: Called with a folder and the bytes copied from it since the last call.

    Raises:
        CheckpointError: A block is damaged in every folder.
    """
    damage = list[str]()
    for holder in holders:
        writer.damage.clear()
        for block, data in read_blocks(holder, blocks):
            if writer.write(block, data):
                count(holder.path, data.nbytes)
        blocks = list(writer.damage)
        if not blocks:
            return damage
        damage += [str(holder.path / str(block)) for block in blocks]
    raise CheckpointError(
        "A part of a tensor is damaged in every folder that holds it",
        where=writer.damage[0],
        found="; ".join(damage),
        fix="Name the folder of another host that has a copy, or an older checkpoint with --iteration.",
    )
