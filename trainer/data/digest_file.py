"""Caches results computed from a data file, such as its digest, so that the next start need not read the file.

A token file's digest lies beside it, or in the prepared data cache if the folder is not writable. A result is valid
only for a file with the same size and change times, to the nanosecond. The last status change time (``st_ctime``)
cannot be set back, so an overwritten or replaced file is read again, even if its size and modification time are
unchanged. Malformed results are ignored and rewritten.

The first line has words, among them the file's size and times. It ends with an xxh3_64 over these words and the
remaining bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from reprise.errors import DataError
from reprise.storage import FILE_SYSTEM, atomic_output, read_regular
from trainer.data.data_file import DataFile
from trainer.data.fingerprint import TokenDigest, scan
from trainer.data.token_file import TokenFile

SUFFIX = ".digest"
_FOLDER = "digests"
_MOST_BYTES = 256 << 20


def digest_of(file: TokenFile, *, cache: Path, read_again: bool = False) -> TokenDigest:
    """Return a file's digest: a valid cached one, or else computed from its tokens and cached.

    Args:
        cache: Folder for the digests of files in read-only folders.
        read_again: Ignore cached digests.

    Raises:
        DataError: The file cannot be read, or was written to meanwhile.
    """

    def compute() -> tuple[str, bytes]:
        digest = scan(file)
        return f"{digest.digest} {digest.largest}", b""

    places = (beside(file.path), in_cache(file.path, file.status(), cache / _FOLDER, SUFFIX))
    about = f"{file.nbytes} {file.dtype.name}"
    (digest, largest), _ = cached_result(file, places, "reprise-digest 1", about, compute, read_again=read_again)
    return TokenDigest(file.nbytes, file.dtype.name, digest, int(largest))


def cached_result(
    file: TokenFile | DataFile,
    places: Sequence[Path],
    form: str,
    about: str,
    compute: Callable[[], tuple[str, bytes]],
    *,
    read_again: bool = False,
) -> tuple[list[str], bytes]:
    """Return words and bytes computed from a file: a valid cached result, or else a new result, which is cached.

    Args:
        places: Cache paths, in order. If a path is not writable, the next is tried. If none is, the next start computes
            again.
        form: The result's name and version.
        about: What the result depends on besides the file.
        read_again: Ignore cached results.

    Raises:
        DataError: See `compute`; or the file was written to meanwhile.
    """
    before = file.status()
    prefix = f"{form} {identity(before)} {about} "
    for place in () if read_again else places:
        with contextlib.suppress(OSError):
            data = read_regular(place, limit_bytes=_MOST_BYTES, follows_links=False)
            line, end, content = data.partition(b"\n")
            text, _, digest = line.rpartition(b" ")
            if end and text.startswith(prefix.encode()) and digest == _digest(text + content):
                return text[len(prefix) :].decode().split(), content
    words, content = compute()
    after = file.status()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise DataError(
            "A data file changed while it was being read",
            where=file.path,
            expected=f"{before.st_size} bytes",
            found=f"{after.st_size} bytes, or a new modification time",
            fix="Start again when no other program is writing to it.",
        )
    text = f"{prefix}{words}".encode()
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, text + b" " + _digest(text + content) + b"\n" + content, changed_ns=after.st_ctime_ns)
            break
    return words.split(), content


def beside(path: Path) -> Path:
    """Return the digest path beside the token file, hidden from globs."""
    return path.with_name(f".{path.name}{SUFFIX}")


def in_cache(path: Path, status: os.stat_result, folder: Path, suffix: str) -> Path:
    """Return the path in a cache folder for results computed from a file.

    The name covers size and times: hosts sharing a cache may have different files under the same path.
    """
    key = f"{os.path.abspath(path)}\n{identity(status)}".encode(errors="surrogateescape")
    return folder / f"{xxhash.xxh3_64_hexdigest(key)}{suffix}"


def identity(status: os.stat_result) -> str:
    """Return a file's size and times, by which a later start recognizes it."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(data).encode()


def _write(place: Path, data: bytes, *, changed_ns: int) -> None:
    """Write results computed from a file atomically, unless that file could still change unnoticed.

    A file changing twice within one clock tick has the same times after both changes. If the result, written after the
    file was read, is not newer than the file's last change, it is discarded.

    Args:
        changed_ns: The file's last status change time.

    Raises:
        OSError: The path cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(place, FILE_SYSTEM, replaces=True) as partial:
        partial.write_bytes(data)
        if partial.stat().st_mtime_ns <= changed_ns:
            partial.unlink()
