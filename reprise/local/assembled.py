"""The whole files of a local checkpoint for an upload: what this host lacks of a file comes from the other hosts.

Every block is checked against its digest. One file at a time is assembled on this host, and removed after its upload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from reprise.atomic import make_folders
from reprise.errors import CheckpointError
from reprise.format.host_file import HostFile, PieceNumbers, path_of, union, without
from reprise.format.layout import Place
from reprise.format.manifest import BLOCK_BYTES, digest_of
from reprise.loading.blocks import PieceBlock, blocks_of
from reprise.loading.reader import Bytes, Checkpoint, read_places
from reprise.local.host_part import HostPart
from reprise.local.part_client import PartClient
from reprise.local.pieces import PieceReader, PieceWriter, damaged_pieces
from reprise.local.skeleton import header_of
from reprise.local.survey import PartSummary, assign, describe
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.upload import LocalSource, SourceChangedError


class AssembledSource(LocalSource):
    """A local checkpoint as the files of a save into a shared folder.

    Args:
        find: returns the part of the checkpoint on this host as it is now; None once it is no longer to be uploaded.
        scratch: the folder in which a file is assembled.
    """

    def __init__(self, path: Path, find: Callable[[], HostPart | None], client: PartClient, scratch: Path) -> None:
        super().__init__(path)
        self._find, self._client, self._scratch = find, client, scratch

    def check(self, files: CheckpointFiles) -> None:
        super().check(files)
        self._part()

    def _part(self) -> HostPart:
        part = self._find()
        if part is None:
            raise SourceChangedError
        return part

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        part = self._part()
        checkpoint = part.checkpoint
        places = {tensor: place for tensor, place in read_places(checkpoint).items() if place.file == name}
        pieces = {tensor: tuple(range(len(part.host.writers[tensor]))) for tensor in places}
        if not without(pieces, part.host.held) and not damaged_pieces(checkpoint, places, pieces):
            yield path_of(self.path, name)
            return
        try:
            self._reserve(checkpoint, name)
            self._assemble(part, places, union([pieces]))
            yield self._scratch / name
        finally:
            checkpoint.files.remove_tree(self._scratch)

    def _reserve(self, checkpoint: Checkpoint, name: str) -> None:
        """Make a file with the size and the header of the whole one."""
        files, target = checkpoint.files, self._scratch / name
        total_bytes = checkpoint.manifest.files[name].total_bytes
        header = header_of(checkpoint, name)
        make_folders(files, target.parent)
        descriptor = files.open_for_writing(target)
        try:
            files.reserve(descriptor, total_bytes)
            files.write(descriptor, [memoryview(header)], offset=0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from error
        finally:
            files.close(descriptor)

    def _assemble(self, part: HostPart, places: dict[str, Place], pieces: PieceNumbers) -> None:
        """Write the pieces of this host, then those of others, but for hosts that fail, and wrong bytes.

        Raises:
            OSError: if the disk fails, or a host that may have the rest does not answer.
            CheckpointError: if no host has the rest undamaged.
        """
        checkpoint, host = part.checkpoint, self._client.host
        with closing(PieceWriter(replace(checkpoint, path=self._scratch))) as writer:
            own = without(pieces, without(pieces, part.host.held))
            blocks = PieceReader(checkpoint).read(blocks_of(checkpoint, places, own), np.empty(BLOCK_BYTES, np.uint8))
            lacking = without(pieces, _write(writer, own, blocks)[0])
            found, silent = self._client.parts(part)
            parts = {number: _of_tensors(places, other, part) for number, other in found.items() if number != host}
            while lacking:
                needs: list[PieceNumbers] = [{} for _ in range(self._client.hosts)]
                needs[host] = lacking
                transfers, absent = assign(needs, parts)
                if any(absent) and silent:
                    raise next(iter(silent.values()))
                if any(absent):
                    raise CheckpointError(
                        "Pieces of a local checkpoint are on no host, or damaged",
                        where=checkpoint.path,
                        found=describe(absent[host], part.host),
                    )
                for transfer in transfers:
                    source, asked = transfer.source, transfer.pieces
                    good, error = _write(writer, asked, self._client.pieces(source, checkpoint, places, asked))
                    lacking = without(lacking, good)
                    if error is None:  # what was wrong is not asked of this host again
                        parts[source] = replace(parts[source], held=without(parts[source].held, asked))
                    else:
                        silent[source] = error
                        del parts[source]


def _of_tensors(names: Collection[str], summary: PartSummary, own: HostPart) -> HostFile:
    """Return what a part has of some tensors."""

    def chosen(pieces: PieceNumbers) -> PieceNumbers:
        return {name: pieces[name] for name in names if name in pieces}

    held = union([chosen(summary.others), *(chosen(own.by_writer[number]) for number in summary.whole)])
    return replace(own.host, held=held)


def _write(
    writer: PieceWriter, pieces: PieceNumbers, blocks: Iterator[tuple[PieceBlock, Bytes]]
) -> tuple[PieceNumbers, OSError | None]:
    """Write the blocks of pieces that have their digests.

    Returns:
        The pieces that are now whole, and the error by which the blocks ended early.

    Raises:
        OSError: if the disk fails.
    """
    begun, wrong = list[tuple[str, int]](), set[tuple[str, int]]()
    failure: OSError | None = None
    while True:
        try:
            block, data = next(blocks)
        except StopIteration:
            break
        except OSError as error:
            failure = error
            break
        piece = block.place.spec.name, block.number
        if piece not in begun[-1:]:
            begun.append(piece)
        if digest_of(data.data) == block.digest:
            writer.write_checked(block, data)
        else:
            wrong.add(piece)
    asked = [(name, number) for name, numbers in pieces.items() for number in numbers]
    good = dict[str, list[int]]()
    for name, number in asked if failure is None else begun[:-1]:
        if (name, number) not in wrong:
            good.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in good.items()}, failure
