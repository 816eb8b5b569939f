"""Writes one rank's pieces into the shared files, digesting them on the way. It commits nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trainer.checkpoint.box import image
from trainer.checkpoint.files import Files
from trainer.checkpoint.layout import FileLayout, Layout
from trainer.checkpoint.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece
from trainer.checkpoint.ownership import Piece
from trainer.checkpoint.snapshot import Snapshot
from trainer.errors import CheckpointError

# Buffers that follow each other in a file are handed to one call up to this size.
RUN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes into one folder that is not yet a checkpoint; every rank has one."""

    folder: Path
    files: Files
    layout: Layout
    rank: int

    def write(self, pieces: Sequence[Piece], snapshot: Snapshot) -> list[WrittenPiece]:
        """Write and sync this rank's pieces and, on rank 0, the headers; return the pieces with their digests.

        Files are taken in an order rotated by rank, so that ranks do not queue for one file.

        Raises:
            CheckpointError: with path, errno and free space, if the file system fails.
        """
        by_file: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_file[self.layout.places[piece.name].file].append(piece)
        order = [file for file in self.layout.files if self.rank == 0 or file.name in by_file]
        turn = self.rank % max(1, len(order))
        reports: dict[str, WrittenPiece] = {}
        for file in order[turn:] + order[:turn]:
            for report in self._write_file(file, by_file[file.name], snapshot):
                reports[report.name] = report
        return [reports[piece.name] for piece in pieces]

    def _write_file(self, file: FileLayout, pieces: list[Piece], snapshot: Snapshot) -> list[WrittenPiece]:
        path = self.folder / file.name
        try:
            self.files.make_folder(path.parent)
            descriptor = self.files.open_for_writing(path)
            try:
                self.files.reserve(descriptor, file.total_bytes)
                if self.rank == 0:
                    self.files.write(descriptor, [memoryview(file.header)], offset=0)
                written = self._write_pieces(descriptor, pieces, snapshot)
                self.files.sync(descriptor)
            finally:
                self.files.close(descriptor)
        except OSError as error:
            raise self._failure(path, error) from error
        return written

    def _write_pieces(self, descriptor: int, pieces: list[Piece], snapshot: Snapshot) -> list[WrittenPiece]:
        run, start, end = list[memoryview](), 0, 0
        written = []
        for piece in pieces:
            data, place = snapshot.bytes_of(piece), self.layout.places[piece.name]
            written.append(WrittenPiece(piece.name, piece.box, piece.lo, piece.hi, digests_of(data)))
            spans = image(piece.box, place.spec.view, place.spec.dtype.itemsize).spans(piece.lo, piece.hi)
            for in_tensor, in_image, length in spans:
                offset, at = place.offset + in_tensor, in_image - piece.lo
                if offset != end or end - start >= RUN_BYTES:
                    self.files.write(descriptor, run, offset=start)
                    run, start, end = [], offset, offset
                run.append(data[at : at + length])
                end += length
        self.files.write(descriptor, run, offset=start)
        return written

    def _failure(self, path: Path, error: OSError) -> CheckpointError:
        try:
            free = f"{self.files.free_bytes(self.folder.parent)} B free"
        except OSError:
            free = "free space unknown"
        return CheckpointError(
            f"Writing a checkpoint failed: {error.strerror} (errno {error.errno})",
            where=path,
            expected=f"room for {self.layout.total_bytes} B",
            found=free,
            fix="Committed checkpoints are untouched; make room or mend the disk.",
        )


def digests_of(data: memoryview) -> bytes:
    """Return the digests of the blocks of a piece's bytes, packed."""
    return b"".join(
        xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]).to_bytes(DIGEST_BYTES, "big")
        for at in range(0, data.nbytes, BLOCK_BYTES)
    )
