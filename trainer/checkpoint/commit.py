"""How the ranks turn what they wrote into one checkpoint, or agree that it is none. `writer.py` writes."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.checkpoint import json_file, manifest
from trainer.checkpoint.board import Board
from trainer.checkpoint.box import Box
from trainer.checkpoint.files import describe_free_space
from trainer.checkpoint.layout import Layout, model_index
from trainer.checkpoint.lock import FolderLock
from trainer.checkpoint.manifest import DIGEST_BYTES, FileEntry, Manifest, WrittenPiece
from trainer.checkpoint.store import CheckpointFolder
from trainer.errors import CheckpointError, LaunchError, TrainerError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
_OK, _FAILED = b"ok", b"no"  # the first two bytes of a report and of a verdict


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save an iteration: `name` is unique in the life of the folder, the same on all ranks."""

    iteration: int
    name: str
    folder: CheckpointFolder
    layout: Layout


def exchange(
    board: Board,
    attempt: Attempt,
    *,
    work: Callable[[], list[WrittenPiece]],
    publish: Callable[[list[WrittenPiece]], list[int]],
    is_declined: Callable[[], bool] = lambda: False,
) -> list[int] | None:
    """Run `work` on every rank and, if all succeed, `publish` on rank 0; all ranks learn the outcome.

    Args:
        is_declined: tells, when `work` has failed, whether `decline` has told the others meanwhile; what they then
            answer may be gone by now, so it is not waited for.

    Returns:
        What `publish` returned, the iterations that are to be deleted now; None where that message was lost.

    Raises:
        TrainerError: on every rank, if the attempt did not become a checkpoint.
        BaseException: on the rank where `work` or `publish` raised it; the others get a CheckpointError that names it.
    """
    key = f"save/{attempt.name}"
    problem: BaseException | None = None
    report = b""
    try:
        report = _OK + encode(work(), attempt.layout)
    except BaseException as error:  # noqa: BLE001 - raised again once the peers know
        problem, report = error, _FAILED + _text(error)
    if board.rank == 0:
        return _decide(board, key, attempt, report=report, problem=problem, publish=publish)
    if problem is not None and is_declined():
        raise problem
    verdict = b""
    try:
        board.collect(f"{key}/report", report)
        verdict = board.from_rank0(f"{key}/verdict", None)
    except LaunchError as error:
        if problem is None and _is_committed(attempt):  # the rename is the truth, whatever became of the message
            return None
        problem = error if problem is None else problem
    if problem is not None:
        raise problem
    if not verdict.startswith(_OK):
        raise CheckpointError(verdict[2:].decode().rstrip("."))
    return [int(number) for number in verdict[2:].split()]


def _decide(
    board: Board,
    key: str,
    attempt: Attempt,
    *,
    report: bytes,
    problem: BaseException | None,
    publish: Callable[[list[WrittenPiece]], list[int]],
) -> list[int]:
    doomed: list[int] = []
    try:
        reports = board.collect(f"{key}/report", report)
        for rank, data in enumerate(reports):
            if not data.startswith(_OK):
                raise CheckpointError(f"Rank {rank}: {data[2:].decode().rstrip('.')}")
        doomed = publish([piece for data in reports for piece in decode(data[2:], attempt.layout)])
    except BaseException as error:  # noqa: BLE001 - raised again once the peers know
        problem = error if problem is None else problem
    if problem is not None:
        _announce(board, key, _FAILED + _text(problem))
        raise problem
    _announce(board, key, _OK + " ".join(map(str, doomed)).encode())
    return doomed


def decline(board: Board, attempt: Attempt, error: TrainerError) -> None:
    """Tell the other ranks in the worker's place, which hangs, that this rank's part of an attempt has failed."""
    key = f"save/{attempt.name}"
    if board.rank == 0:
        _announce(board, key, _FAILED + _text(error))
        return
    try:
        board.post(f"{key}/report/{board.rank}", _FAILED + _text(error))
    except LaunchError as lost:
        _log.error("the failure of %s did not go out: %s", key, lost)


def _announce(board: Board, key: str, verdict: bytes) -> None:
    """Tell all ranks; where the store is gone, they look for the folder: nothing that happened here changes by it."""
    try:
        board.from_rank0(f"{key}/verdict", verdict)
    except LaunchError as error:
        _log.error("the verdict on %s did not go out: %s", key, error)


def _text(error: BaseException) -> bytes:
    return (str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}").encode()


def _is_committed(attempt: Attempt) -> bool:
    path = attempt.folder.iteration(attempt.iteration) / MANIFEST
    try:
        return manifest.from_bytes(path.read_bytes(), where=path).attempt == attempt.name
    except (OSError, TrainerError):
        return False


def publish(
    attempt: Attempt,
    written: Sequence[WrittenPiece],
    *,
    documents: Mapping[str, json_file.Json],
    aliases: Mapping[str, str],
    lock: FolderLock | None,
) -> None:
    """Check that the pieces tile every tensor, write the JSON files and the manifest, sync, and rename. Rank 0 only.

    Raises:
        CheckpointError: if the pieces do not tile, the lock is lost, or the file system fails.
    """
    files, folder = attempt.folder.files, attempt.folder.partial(attempt.iteration, attempt.name)
    tensors = manifest.tile(attempt.layout, written)
    entries = {
        file.name: FileEntry(file.total_bytes, manifest.digest_of(file.header), is_tensor_file=True)
        for file in attempt.layout.files
    }
    try:
        for name, document in {INDEX: model_index(attempt.layout), **documents}.items():
            data = json_file.to_bytes(document)
            files.write_whole(folder / name, data)
            entries[name] = FileEntry(len(data), manifest.digest_of(data), is_tensor_file=False)
        data = manifest.to_bytes(Manifest(attempt.name, entries, tensors, aliases))
        files.write_whole(folder / MANIFEST, data)
        for path in sorted({(folder / name).parent for name in entries}, reverse=True):
            files.sync_folder(path)
        if lock is not None:
            lock.check()
        attempt.folder.commit(attempt.iteration, attempt.name)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(
            f"Committing a checkpoint failed: {error.strerror} (errno {error.errno})",
            where=where,
            expected=f"room for {attempt.layout.total_bytes} B",
            found=describe_free_space(files, attempt.folder.root),
            fix="Committed checkpoints are untouched; make room or mend the disk.",
        ) from error


_PIECE = struct.Struct("<IBQQI")


def encode(pieces: Sequence[WrittenPiece], layout: Layout) -> bytes:
    """Return a report: per piece the tensor's number in the layout, dimensions, byte range, digests, box."""
    numbers = {name: number for number, name in enumerate(layout.places)}
    parts = []
    for piece in pieces:
        dims = len(piece.box.offset)
        count = len(piece.digests) // DIGEST_BYTES
        parts.append(_PIECE.pack(numbers[piece.name], dims, piece.lo, piece.hi, count))
        parts.append(struct.pack(f"<{2 * dims}Q", *piece.box.offset, *piece.box.shape))
        parts.append(piece.digests)
    return b"".join(parts)


def decode(data: bytes, layout: Layout) -> list[WrittenPiece]:
    """Return the pieces of a report."""
    names = list(layout.places)
    pieces, at = [], 0
    while at < len(data):
        number, dims, lo, hi, count = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        numbers = struct.unpack_from(f"<{2 * dims}Q", data, at)
        at += 16 * dims
        digests = data[at : at + count * DIGEST_BYTES]
        at += count * DIGEST_BYTES
        pieces.append(WrittenPiece(names[number], Box(numbers[:dims], numbers[dims:]), lo, hi, digests))
    return pieces
