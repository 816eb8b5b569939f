"""Joins the folders of several hosts into a complete checkpoint: a copy of their parts, every block checked."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import HostFile
from reprise.format.names import HOST, MANIFEST
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places
from reprise.local.parts import Parts, candidates
from reprise.local.pieces import PieceWriter, piece_blocks, read_blocks
from reprise.local.skeleton import skeleton_of, write_skeleton
from reprise.paths import exists
from reprise.storage.files import Files, cannot_write
from reprise.storage.folder import CheckpointFolder, is_iteration_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """A joined checkpoint.

    Args:
        taken_bytes: by folder, the bytes copied from it.
        damage: descriptions of damaged blocks, which were copied from another folder.
    """

    path: Path
    taken_bytes: Mapping[Path, int]
    damage: Sequence[str]


def open_parts(path: Path, files: Files) -> list[Checkpoint]:
    """Return the local checkpoints in the folder of a host, or `path` itself.

    Damaged checkpoints in a folder, and any of no single host, are logged and left out.

    Raises:
        CheckpointError: if `path` is a damaged checkpoint, or of no single host.
    """
    if is_iteration_name(path.name) or exists(path / MANIFEST):
        return [_open_part(path, files)]
    folder, checkpoints = CheckpointFolder(path, files), list[Checkpoint]()
    for iteration in folder.committed():
        try:
            checkpoints.append(_open_part(folder.iteration(iteration), files))
        except TrainerError as error:
            _log.error("%s is left out: %s", folder.iteration(iteration), error)
    return checkpoints


def _open_part(path: Path, files: Files) -> Checkpoint:
    checkpoint = open_checkpoint(path, files)
    read_places(checkpoint)
    if checkpoint.host is None:
        raise CheckpointError("A checkpoint is not that of one host", where=path, expected=HOST, found="all pieces")
    return checkpoint


def newest_complete(folders: Sequence[Checkpoint], iteration: int | None = None) -> list[Checkpoint]:
    """Return the folders of the newest checkpoint complete in them, or of the given iteration.

    Args:
        folders: local checkpoints, of any hosts and iterations.

    Raises:
        CheckpointError: naming the hosts whose parts are missing.
    """
    problems = list[str]()
    for candidate in candidates([{folder.iteration: Parts.of(host_of(folder))} for folder in folders]):
        if iteration in (None, candidate.iteration):
            lacks = candidate.together.describe_missing()
            if not lacks:
                for problem in problems:
                    _log.warning("%s; an older one is whole", problem)
                return [folders[number] for number in sorted(candidate.folders)]
            problems.append(f"iteration {candidate.iteration} lacks {lacks}")
    outcome = "No checkpoint is whole" if iteration is None else f"Iteration {iteration} is not whole"
    raise CheckpointError(
        f"{outcome} in these folders together",
        found="; ".join(problems) or "no part of it",
        fix="Name the folders of the other hosts too, or of hosts that have copies of these parts.",
    )


def host_of(folder: Checkpoint) -> HostFile:
    """Return the `host.json` of a local checkpoint."""
    assert folder.host is not None
    return folder.host


def join(
    folders: Sequence[Checkpoint],
    out: CheckpointFolder,
    *,
    attempt: str,
    progress: Callable[[int], None] = lambda _: None,
) -> Joined:
    """Write the checkpoint of these folders into another, under its lock: complete or not at all.

    Each part comes from the first folder that holds it, its damaged blocks from the next.

    Args:
        folders: of a single checkpoint, from `newest_complete`.
        attempt: a unique name in the life of the folder.
        progress: called with the number of bytes written since the last call.

    Raises:
        CheckpointError: if a block is damaged wherever it lies, or the output cannot be written.
    """
    first, taken_bytes, damage = folders[0], Counter[Path](), list[str]()
    target, partial = out.iteration(first.iteration), out.partial(first.iteration, attempt)
    if out.files.exists(target):
        raise CheckpointError("There is something already", where=target, fix="Move it away, or name another folder.")
    try:
        with contextlib.closing(PieceWriter(replace(first, path=partial))) as writer:
            write_skeleton(partial, skeleton_of(first), out.files, is_whole=True, with_room=True)
            for part, pieces in host_of(first).by_host().items():
                blocks = list(piece_blocks(first, pieces))
                for folder in folders:
                    if blocks and part in host_of(folder).parts:
                        writer.damage.clear()
                        for block, data in read_blocks(folder, blocks):
                            if writer.write(block, data):
                                taken_bytes[folder.path] += data.nbytes
                                progress(data.nbytes)
                        blocks = list(writer.damage)
                        damage += [str(folder.path / str(block)) for block in blocks]
                if blocks:
                    raise CheckpointError(
                        "A part of a tensor is damaged in every folder that holds it",
                        where=str(blocks[0]),
                        found="; ".join(damage),
                        fix="Name the folder of another host that has a copy, or an older checkpoint with --iteration.",
                    )
            writer.sync()
        for name in {(partial / name).parent for name in first.manifest.files} | {partial}:
            out.files.sync_folder(name)
        out.commit(first.iteration, attempt)
    except OSError as error:
        raise cannot_write(partial, error, what="The output", files=out.files) from error
    finally:
        with contextlib.suppress(OSError):  # the error that led here matters more
            out.files.remove_tree(partial)
    return Joined(target, taken_bytes, damage)
