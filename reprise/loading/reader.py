"""Opens a committed checkpoint: checks its completeness, and locates every tensor."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.errors import CheckpointError, MismatchError, UnreadableError, first_of
from reprise.format import host_file, manifest
from reprise.format.box import Image, covered_bytes
from reprise.format.host_file import HostFile
from reprise.format.layout import MOST_ELEMENTS, Place, TensorKind, TensorSpec, header_places, kind_of_file
from reprise.format.manifest import Manifest
from reprise.format.names import ACCESSORIES, FORMAT, HOST, MANIFEST, OPTIMIZER_DROPPED, STATE, is_lightened
from reprise.storage import json_file
from reprise.storage.files import Files
from reprise.storage.folder import named_iteration
from reprise.storage.json_file import Json
from reprise.storage.patience import failed_read
from reprise.storage.shared_folder import on_this_host, why_unseen

Bytes = npt.NDArray[np.uint8]
Tree = Mapping[str, os.stat_result]  # a checkpoint's files by name
_MAX_HEADER_BYTES = 100 << 20  # the safetensors library's limit
# Gaps up to this size are read and discarded. With two threads on warm files, a call cost as much as reading 50 KB more
# (runs from 2 to 28 KB). A call per run took 3 to 9 times as long for GPT-2's tensor-parallel runs. Ranks on the same
# host read each other's runs from the page cache.
GAP_BYTES = 32 << 10
# Bytes per read with gaps: small enough to stay in the processor's cache until they are copied.
SCRATCH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint with verified JSON files. Its tensors have not been read.

    Args:
        digest: The manifest digest. Folders with equal digests hold the same checkpoint.
        host: The pieces in this folder, if it is a single host's folder. None if all pieces are here.
        lacking: By name, the problem with each missing or damaged file without state.
        is_lightened: Whether the optimizer state was dropped. `manifest.files` then has none of its files.
    """

    path: Path
    files: Files
    manifest: Manifest
    state: Json
    digest: str = ""
    host: HostFile | None = None
    lacking: Mapping[str, CheckpointError] = field(default_factory=dict, compare=False)
    is_lightened: bool = False
    _places: dict[str, Place] = field(
        default_factory=dict, repr=False, compare=False
    )  # filled by the first `read_places`

    @property
    def iteration(self) -> int:
        return int(self.state["iteration"])

    @property
    def has_optimizer(self) -> bool:
        return any(map(_is_of_optimizer, self.manifest.files))

    @property
    def is_whole(self) -> bool:
        """Return whether every piece is in this folder."""
        return self.host is None or self.host.is_whole

    def accessory(self, name: str) -> Path | None:
        """Return the path to a file without state. None if it is missing or damaged."""
        return self.path / name if name in self.manifest.files and name not in self.lacking else None

    def held(self, tensor: str) -> Collection[int]:
        """Return the numbers of a tensor's pieces in this folder, in manifest order."""
        if self.host is None:
            return range(MOST_ELEMENTS)
        return self.host.held.get(tensor, ())


def open_checkpoint(path: Path, files: Files, *, may_lack: bool = False) -> Checkpoint:
    """Check the manifest, all file sizes and every JSON file, and return the checkpoint. Reads no tensor.

    Args:
        may_lack: Whether to open it despite missing or damaged files without state.

    Raises:
        MismatchError: It has another format version.
        UnreadableError: A file cannot be read now.
        CheckpointError: A file is missing or damaged (names the first), or the folder has another iteration's name.
    """
    try:
        content = files.read_whole(path / MANIFEST)
        listing = manifest.from_bytes(content, where=path / MANIFEST)
        folders = {name.rpartition("/")[0] for name in listing.files}
        tree, is_dropped = files.tree(path, folders), False
        of_optimizer = {*filter(_is_of_optimizer, listing.files)}
        if not of_optimizer <= tree.keys():
            tree = files.tree(path, folders)  # the marker of their removal may be newer than the first listing
            is_dropped = is_lightened(tree)
    except OSError as error:
        fix = "Pass another folder."
        raise failed_read(f"A folder without {MANIFEST} is not a checkpoint", error, where=path, fix=fix) from error
    if is_dropped:
        remaining = {name: entry for name, entry in listing.files.items() if name not in of_optimizer}
        listing = replace(listing, files=remaining)

    def checked(name: str) -> bytes | CheckpointError:
        try:
            return _checked_file(path, name, listing.files[name], files, tree)
        except CheckpointError as error:
            return error

    contents, lacking = dict[str, bytes](), dict[str, CheckpointError]()
    for name, data in zip(listing.files, files.map(checked, listing.files), strict=True):
        if not isinstance(data, CheckpointError):
            contents[name] = data
        elif may_lack and name in ACCESSORIES and not isinstance(data, UnreadableError):
            lacking[name] = data
        else:
            raise data
    if not contents.get(STATE):
        raise CheckpointError("A checkpoint has no state file", where=path / STATE)
    state = json_file.parse(contents[STATE], where=path / STATE)
    check_state(state, path)
    digest = manifest.digest_of(content)
    host = _host_file(path, files, digest) if HOST in tree else None
    was_dropped = is_dropped or OPTIMIZER_DROPPED in state  # release 0.2 recorded it in the state
    return Checkpoint(path, files, listing, state, digest, host, lacking, was_dropped)


def open_same(path: Path, digest: str, files: Files, *, reader: int = 0) -> Checkpoint:
    """Open rank 0's checkpoint, with retries: a network file system may first show older or partial files.

    Rank 0 found the checkpoint complete, so a problem here is a difference in this host's files, not damage. Treating
    it as damage would make the run fall back to an older checkpoint.

    Args:
        digest: The digest of the manifest read by rank 0.
        reader: The rank with this digest, if not rank 0.

    Raises:
        MismatchError: After `SEEN_WITHIN_S`, this rank still reads another manifest, or finds a file missing or
            damaged. Names this host and the path.
        UnreadableError: See `open_checkpoint`.
    """
    checkpoints: list[Checkpoint] = []

    def look(path: Path) -> None:
        try:
            checkpoint = open_checkpoint(path, files, may_lack=True)
        except UnreadableError:
            raise
        except CheckpointError as error:
            raise OSError(str(error)) from error
        if checkpoint.digest != digest:
            raise OSError(f"digest {checkpoint.digest}")
        checkpoints.append(checkpoint)

    if difference := why_unseen(path, look):
        raise MismatchError(
            f"This host reads a different checkpoint from rank {reader} at the same path",
            where=on_this_host(path / MANIFEST),
            expected=f"digest {digest}",
            found=difference,
            fix="No training was done. Mount the same file system at this path on every host, or remove the copy that "
            "differs.",
        )
    return checkpoints[0]


def _is_of_optimizer(file: str) -> bool:
    return kind_of_file(file) is TensorKind.OPTIMIZER


def check_state(state: Json, path: Path) -> None:
    """Check the format and iteration in `trainer_state.json` for a checkpoint at `path`.

    Raises:
        MismatchError: It has another format version.
        CheckpointError: The iteration is missing, or differs from the folder's name.
    """
    if state.get("format") != FORMAT:
        raise MismatchError(
            "The checkpoint has an unsupported format version",
            where=path / STATE,
            expected=FORMAT,
            found=state.get("format"),
            fix="Load it with the Reprise version that wrote it, or a newer one.",
        )
    iteration = state.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= MOST_ELEMENTS:
        raise CheckpointError(
            "A state file has no iteration", where=path / STATE, expected="a natural number", found=repr(iteration)
        )
    number = named_iteration(path.name)
    if number is not None and number != iteration:  # a run would continue counting from there
        raise CheckpointError(
            "The checkpoint folder's name does not match its iteration",
            where=path,
            expected=f"iteration {number} in {STATE}",
            found=f"iteration {iteration}",
            fix="Rename the folder to match its iteration, or to a name that does not start with iter_.",
        )


def _host_file(path: Path, files: Files, digest: str) -> HostFile:
    """Return the `host.json` in a folder without all pieces."""
    where = path / HOST
    host = host_file.from_bytes(_content(where, files), where=where)
    if host.manifest != digest:
        raise CheckpointError(
            "The host file belongs to a different checkpoint",
            where=where,
            expected=f"manifest {digest}",
            found=host.manifest,
        )
    return host


def _checked_file(root: Path, name: str, entry: manifest.FileEntry, files: Files, tree: Tree) -> bytes:
    """Check a file's size and, unless it is a tensor file, its digest. Return the content, empty for a tensor file."""
    stored = name if name in tree else host_file.stored_name(name, is_whole=False)
    status, path = tree.get(stored), root / stored
    if status is None or not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            "A checkpoint file is missing", where=root / name, expected="a regular file, not behind a link"
        )
    if status.st_size != entry.total_bytes:
        raise CheckpointError(
            "A file has the wrong size",
            where=path,
            expected=f"{entry.total_bytes} B",
            found=f"{status.st_size} B",
        )
    return b"" if entry.is_tensor_file else _checked_content(path, entry, files)


def _content(path: Path, files: Files) -> bytes:
    """Return the content of a file without tensors.

    Raises:
        CheckpointError: The file is missing, too large, or not a regular file.
        UnreadableError: The file cannot be read now.
    """
    try:
        return files.read_whole(path)
    except OSError as error:
        raise failed_read("A checkpoint file cannot be read", error, where=path) from error


def _checked_content(path: Path, entry: manifest.FileEntry, files: Files) -> bytes:
    data = _content(path, files)
    if manifest.digest_of(data) != entry.digest:
        raise CheckpointError(
            "A file is damaged", where=path, expected=f"digest {entry.digest}", found=manifest.digest_of(data)
        )
    return data


def read_file(checkpoint: Checkpoint, name: str) -> bytes:
    """Return the content of a file without tensors, after checking it against its digest in the manifest.

    Raises:
        CheckpointError: The file is missing or damaged.
        UnreadableError: The file cannot be read now.
    """
    path, entry = host_file.path_of(checkpoint.path, name), checkpoint.manifest.files[name]
    return _checked_content(path, entry, checkpoint.files)


def read_places(checkpoint: Checkpoint) -> Mapping[str, Place]:
    """Check every safetensors header against the manifest, once, and return every tensor's place by name.

    Raises:
        CheckpointError: A header is damaged or malformed, or contradicts the manifest.
    """
    if not checkpoint._places:
        names = [name for name, entry in checkpoint.manifest.files.items() if entry.is_tensor_file]
        in_files = checkpoint.files.map(partial(_read_header, checkpoint), names)
        checkpoint._places.update({place.spec.name: place for in_file in in_files for place in in_file})
    return checkpoint._places


def check_tensors(
    specs: Sequence[TensorSpec],
    places: Mapping[str, Place],
    *,
    where: object,
    is_partial: bool = False,
    further: Sequence[str] = (),
) -> None:
    """Compare all expected tensors with those in the checkpoint, before anything is copied.

    Args:
        is_partial: Whether the checkpoint may have other tensors.
        further: The caller's own problems, listed after these.

    Raises:
        MismatchError: Lists every missing or unexpected tensor and every difference in shape or dtype.
    """
    problems = []
    expected = {spec.name: spec for spec in specs}
    kinds = {spec.kind for spec in specs}
    for name, spec in expected.items():
        if name not in places:
            problems.append(f"{name} is missing")
            continue
        saved_spec = places[name].spec
        if saved_spec.shape != spec.shape:
            problems.append(f"{name} has shape {list(saved_spec.shape)}, the model has {list(spec.shape)}")
        if saved_spec.dtype != spec.dtype:
            problems.append(f"{name} has dtype {saved_spec.dtype}, the model has {spec.dtype}")
    if not is_partial:
        names = (name for name, place in places.items() if place.spec.kind in kinds and name not in expected)
        problems += [f"{name} is unexpected" for name in names]
    problems += further
    if problems:
        text = first_of(problems, 20, "; ")
        raise MismatchError("The checkpoint's tensors do not match the model's", where=where, found=text)


def tensor_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of all tensors in a checkpoint, in bytes."""
    return sum(place.spec.total_bytes for place in read_places(checkpoint).values())


def _read_header(checkpoint: Checkpoint, name: str) -> list[Place]:
    entry, path = checkpoint.manifest.files[name], checkpoint.path / name
    with open_tensor_file(checkpoint.files, path) as file:
        data = read_header(file, entry.total_bytes, where=path)
    if manifest.digest_of(data) != entry.digest:
        raise CheckpointError("A safetensors header is damaged", where=path, expected=f"digest {entry.digest}")
    places = header_places(data, name, kind_of_file(name), entry.total_bytes, where=path)
    return [_as_written(checkpoint, place) for place in places]


def require_held(checkpoint: Checkpoint, place: Place, number: int) -> None:
    """Require a piece in this folder.

    Raises:
        CheckpointError: It is on another host.
    """
    host, name = checkpoint.host, place.spec.name
    if host is None or number in host.held.get(name, ()):
        return
    raise CheckpointError(
        "A tensor piece is on another host",
        where=f"{checkpoint.path / place.file}, tensor {name}, piece {number}",
        expected=f"a copy of what host {host.hosts[host.writers[name][number]]} wrote",
        found="no data",
        fix="Resume from the local checkpoints of all hosts, or join their folders: "
        "`reprise checkpoint gather FOLDER... OUT`.",
    )


def read_header(file: OpenFile, total_bytes: int, *, where: Path) -> bytes:
    """Return a safetensors file's header with its 8-byte length. The file has `total_bytes`.

    Raises:
        CheckpointError: The length is beyond the file, or beyond the safetensors library's limit.
    """
    prefix = bytearray(8)
    file.read(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > min(_MAX_HEADER_BYTES, total_bytes - 8):
        raise CheckpointError("A safetensors header is damaged", where=where, found=f"a length of {length} B")
    data = bytearray(8 + length)
    file.read(memoryview(data), 0)
    return bytes(data)


def _as_written(checkpoint: Checkpoint, place: Place) -> Place:
    """Return a header's place with the view in which the tensor was written, according to the manifest."""
    spec = place.spec
    entry = checkpoint.manifest.tensors.get(spec.name)
    if entry is None or math.prod(entry.view) != math.prod(spec.shape) or not entry.fits(spec.dtype.itemsize):
        raise CheckpointError(
            "A header and the manifest disagree",
            where=f"{checkpoint.path / place.file}, tensor {spec.name}",
            expected=f"an entry for shape {list(spec.shape)} of {spec.dtype}",
            found="no entry" if entry is None else f"view {list(entry.view)}, {len(entry.digests)} B of digests",
        )
    return place if spec.view == entry.view else replace(place, spec=replace(spec, view=entry.view))


@dataclass(slots=True)
class OpenFile:
    """A checkpoint file open for reading, by one thread."""

    files: Files
    path: Path
    descriptor: int
    _scratch: Bytes = field(default_factory=lambda: np.empty(SCRATCH_BYTES, np.uint8))

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            CheckpointError: The file ends before the buffer is full.
        """
        count = self.files.read(self.descriptor, buffer, offset=offset)
        if count != buffer.nbytes:
            expected, size = f"{buffer.nbytes} B at {offset}", f"{count} B"
            raise CheckpointError("The file is shorter than expected", where=self.path, expected=expected, found=size)

    def gather(self, image: Image, lo: int, into: Bytes, *, offset: int) -> None:
        """Fill `into` with packed image bytes, starting at byte `lo`. The image's tensor starts at `offset`."""
        for shape, start, at in image.boxes(lo, lo + into.size):
            part = into[at - lo : at - lo + math.prod(shape)].reshape(shape)
            self._cover(offset + start, image.strides, part)

    def _cover(self, start: int, strides: Sequence[int], into: Bytes) -> None:
        """Fill the C-ordered array `into` from the bytes at `start` with `strides`. The last stride is 1."""
        if into.ndim == 1:
            self.read(into.data, start)
            return
        count, stride = len(into), strides[0]
        length = covered_bytes(into.shape[1:], strides[1:])
        if stride - length > GAP_BYTES or length > self._scratch.size or count == 1:
            for index in range(count):
                self._cover(start + index * stride, strides[1:], into[index])
            return
        most = 1 + (self._scratch.size - length) // stride
        for first in range(0, count, most):
            part = into[first : first + most]
            covering = self._scratch[: (len(part) - 1) * stride + length]
            rows = np.ndarray(part.shape, np.uint8, covering, 0, strides)
            self.read(covering.data, start + first * stride)
            np.copyto(part, rows)


@contextlib.contextmanager
def open_tensor_file(files: Files, path: Path) -> Iterator[OpenFile]:
    """Open a tensor file for reading.

    Raises:
        CheckpointError: The file is missing, or is not a regular file.
        UnreadableError: The file cannot be opened or read now.
    """
    try:
        descriptor = files.open_for_reading(path)
        try:
            yield OpenFile(files, path, descriptor)
        finally:
            files.close(descriptor)
    except OSError as error:
        raise failed_read("A file cannot be read", error, where=path) from error
