"""Joins the folders of several hosts into a complete checkpoint: a copy of ranges, every block checked."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import HostFile
from reprise.format.manifest import BLOCK_BYTES, digest_of
from reprise.format.names import HOST, MANIFEST
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import (
    Bytes,
    Checkpoint,
    Gatherer,
    OpenFile,
    open_checkpoint,
    open_tensor_file,
    read_places,
)
from reprise.local.pieces import PieceWriter
from reprise.local.skeleton import skeleton_of, write_skeleton
from reprise.local.survey import candidates
from reprise.paths import exists
from reprise.storage.files import MOST_OPEN, Files, cannot_write
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
    if checkpoint.host is None:
        raise CheckpointError("A checkpoint is not that of one host", where=path, expected=HOST, found="all pieces")
    return checkpoint


def newest_complete(parts: Sequence[Checkpoint], iteration: int | None = None) -> list[Checkpoint]:
    """Return the parts of the newest checkpoint complete among them, or of the given iteration.

    The headers of the first are intact.

    Args:
        parts: local checkpoints, of any hosts and iterations.

    Raises:
        CheckpointError: naming the missing pieces, by their host.
    """
    problems = list[str]()
    for candidate in candidates([{part.iteration: host_of(part)} for part in parts]):
        if iteration not in (None, candidate.iteration):
            continue
        lacks = candidate.describe_missing()
        if not lacks:
            for problem in problems:
                _log.warning("%s; an older one is whole", problem)
            return _headers_first([parts[number] for number in sorted(candidate.parts)])
        problems.append(f"iteration {candidate.iteration} lacks {lacks}")
    outcome = "No checkpoint is whole" if iteration is None else f"Iteration {iteration} is not whole"
    raise CheckpointError(
        f"{outcome} in these folders together",
        found="; ".join(problems) or "no part of it",
        fix="Name the folders of the other hosts too, or of hosts that have copies of these pieces.",
    )


def _headers_first(parts: list[Checkpoint]) -> list[Checkpoint]:
    """Return the parts, a part with intact headers before all others.

    Raises:
        CheckpointError: if there is none.
    """
    for number, part in enumerate(parts):
        try:
            read_places(part)
        except TrainerError as error:
            if number == len(parts) - 1:
                raise
            _log.warning("headers are taken from another folder: %s", error)
        else:
            return [part, *parts[:number], *parts[number + 1 :]]
    return parts


def host_of(part: Checkpoint) -> HostFile:
    """Return the `host.json` of a local checkpoint."""
    assert part.host is not None
    return part.host


def join(
    parts: Sequence[Checkpoint],
    out: CheckpointFolder,
    *,
    attempt: str,
    progress: Callable[[int], None] = lambda _: None,
) -> Joined:
    """Write the checkpoint of these parts into a folder, under its lock: complete or not at all.

    Damaged bytes of a folder are taken from another folder with the piece.

    Args:
        parts: of a single checkpoint, from `newest_complete`.
        attempt: a unique name in the life of the folder.
        progress: called with the number of bytes written since the last call.

    Raises:
        CheckpointError: if a block is damaged wherever it lies, or the output cannot be written.
    """
    first, places = parts[0], read_places(parts[0])
    target, partial = out.iteration(first.iteration), out.partial(first.iteration, attempt)
    if out.files.exists(target):
        raise CheckpointError("There is something already", where=target, fix="Move it away, or name another folder.")
    try:
        with _Blocks(parts) as blocks, contextlib.closing(PieceWriter(replace(first, path=partial))) as writer:
            write_skeleton(partial, skeleton_of(first), out.files, is_whole=True, with_room=True)
            pieces = {name: tuple(range(len(writers))) for name, writers in host_of(first).writers.items()}
            for block in blocks_of(first, places, pieces):
                writer.write_checked(block, blocks.read(block))
                progress(block.hi - block.lo)
            writer.sync()
        for name in {(partial / name).parent for name in first.manifest.files} | {partial}:
            out.files.sync_folder(name)
        out.commit(first.iteration, attempt)
    except OSError as error:
        raise cannot_write(partial, error, what="The output", files=out.files) from error
    finally:
        with contextlib.suppress(OSError):  # the error that led here matters more
            out.files.remove_tree(partial)
    return Joined(target, blocks.taken_bytes, blocks.damage)


class _Blocks:
    """Reads each block from a part with it undamaged."""

    def __init__(self, parts: Sequence[Checkpoint]) -> None:
        self._parts = parts
        self._held = [{name: frozenset(numbers) for name, numbers in host_of(part).held.items()} for part in parts]
        self._gatherer, self._buffer = Gatherer(), np.empty(BLOCK_BYTES, np.uint8)
        self._open: dict[Path, OpenFile] = {}
        self._stack = contextlib.ExitStack()
        self.taken_bytes: Counter[Path] = Counter()
        self.damage: list[str] = []

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, block: PieceBlock) -> Bytes:
        """Return the bytes of a block, valid until the next call.

        Raises:
            CheckpointError: if they are damaged in every folder.
        """
        data, name = self._buffer[: block.hi - block.lo], block.place.spec.name
        problems = list[str]()
        for part, present in zip(self._parts, self._held, strict=True):
            if block.number not in present.get(name, ()):
                continue
            problem = self._fill(part, block, data)
            if not problem:
                self.taken_bytes[part.path] += data.nbytes
                self.damage += problems
                return data
            problems.append(f"{part.path / str(block)}: {problem}")
        raise CheckpointError(
            "A part of a tensor is damaged in every folder that holds it",
            where=str(block),
            found="; ".join(problems),
            fix="Name the folder of another host that has a copy, or an older checkpoint with --iteration.",
        )

    def _fill(self, part: Checkpoint, block: PieceBlock, data: Bytes) -> str:
        """Read a block from a part; return the problem, or an empty string."""
        try:
            file = self._file(part, block.place.file)
            self._gatherer.gather(file.read, block.packed, block.lo, data, offset=block.place.offset)
        except (CheckpointError, OSError) as error:
            return str(error).rstrip(".")
        digest = digest_of(data.data)
        return "" if digest == block.digest else f"expected digest {block.digest}, found {digest}"

    def _file(self, part: Checkpoint, name: str) -> OpenFile:
        path = part.path / name
        if path not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._stack.close()
                self._open.clear()
            self._open[path] = self._stack.enter_context(open_tensor_file(part.files, path))
        return self._open[path]
