"""Caches a token file's digest, so that the next start need not read the file.

The digest lies beside the file, or in the prepared data cache if the folder is not writable. It is valid only for a
file with the same size and change times, to the nanosecond. The last status change time (``st_ctime``) cannot be set
back, so an overwritten or replaced file is read again, even if its size and modification time are unchanged. A
malformed digest file is ignored and rewritten.

It is a line with words, among them the file's size and times, that ends with an xxh3_64 over the words before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from reprise.storage import FILE_SYSTEM, atomic_output, read_regular
from trainer.data.data_file import changed
from trainer.data.fingerprint import TokenDigest, scan
from trainer.data.token_file import TokenFile

SUFFIX = ".digest"
_FOLDER = "digests"
_MOST_BYTES = 1 << 10


def digest_of(file: TokenFile, *, cache: Path) -> TokenDigest:
    """Return a file's digest: a valid cached one, or else computed from its tokens and cached.

    Args:
        cache: Folder for the digests of files in read-only folders.

    Raises:
        DataError: The file cannot be read, or was written to meanwhile.
    """

    before = file.status()
    prefix = f"reprise-digest 1 {_identity(before)} {file.nbytes} {file.dtype.name} "
    places = beside(file.path), in_cache(file.path, before, cache)
    for place in places:
        with contextlib.suppress(OSError):
            text, _, checksum = read_regular(place, limit_bytes=_MOST_BYTES).rpartition(b" ")
            if text.startswith(prefix.encode()) and checksum == _checksum(text):
                digest, largest = text[len(prefix) :].decode().split()
                return TokenDigest(file.nbytes, file.dtype.name, digest, int(largest))
    found, after = scan(file), file.status()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise changed(file.path, before.st_size, after.st_size)
    text = f"{prefix}{found.digest} {found.largest}".encode()
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, text + b" " + _checksum(text), changed_ns=after.st_ctime_ns)
            break
    return found


def beside(path: Path) -> Path:
    """Return the digest path beside the token file, hidden from globs."""
    return path.with_name(f".{path.name}{SUFFIX}")


def in_cache(path: Path, status: os.stat_result, cache: Path) -> Path:
    """Return the digest path in a cache of prepared data.

    The name covers size and times: hosts sharing a cache may have different files under the same path.
    """
    key = f"{os.path.abspath(path)}\n{_identity(status)}".encode(errors="surrogateescape")
    return cache / _FOLDER / f"{xxhash.xxh3_64_hexdigest(key)}{SUFFIX}"


def _identity(status: os.stat_result) -> str:
    """Return a file's size and times, by which a later start recognizes it."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(data).encode() + b"\n"


def _write(place: Path, data: bytes, *, changed_ns: int) -> None:
    """Write a file's digest atomically, unless that file could still change unnoticed.

    A file changing twice within one clock tick has the same times after both changes. If the digest, written after the
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
