"""Caches the digest of a token file in a small file, to spare the next start from reading the tokens.

The digest file lies beside the token file, or in the cache of prepared data if the folder is not writable. It is valid
only for a file of the same size and times of change, to the nanosecond. The time of the last change of status
(``st_ctime``) cannot be set back, so an overwritten or replaced file is read again, even if its size and
modification time are the same. A malformed digest file is ignored and rewritten.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import xxhash

from reprise.errors import DataError
from reprise.storage import FileCalls, atomic_output, read_regular
from trainer.data.fingerprint import TokenDigest, scan
from trainer.data.token_file import TokenFile

SUFFIX = ".digest"
_FOLDER = "digests"
# Version, size and times of the file; bytes and dtype of its tokens, their digest, the largest; digest of all before.
_LINE = re.compile(
    rb"(reprise-digest 1 (\d{1,19}) (-?\d{1,19}) (-?\d{1,19}) (\d{1,19}) (uint16|uint32) ([0-9a-f]{16}) (-1|\d{1,10})) "
    rb"([0-9a-f]{16})\n"
)
_MOST_BYTES = 256


def digest_of(file: TokenFile, *, cache: Path, read_again: bool = False) -> TokenDigest:
    """Return the digest of a file, from the cache if it is valid, otherwise from its tokens, and cache it.

    Args:
        cache: folder for the digests of files in read-only folders.
        read_again: ignore the cache.

    Raises:
        DataError: the file cannot be read, or was written to meanwhile.
    """
    before = file.status()
    places = (beside(file.path), in_cache(file.path, before, cache / _FOLDER, SUFFIX))
    if not read_again:
        for place in places:
            cached = _read(place, before)
            if cached is not None and (cached.token_bytes, cached.dtype) == (file.nbytes, file.dtype.name):
                return cached
    digest, after = scan(file), file.status()
    check_unchanged(file.path, before, after)
    for place in places:
        # On a file system without a right to write the next place is tried; without any, the next start reads again.
        with contextlib.suppress(OSError):
            write_cached(place, _line(digest, before), changed_ns=after.st_ctime_ns)
            break
    return digest


def beside(path: Path) -> Path:
    """Return the digest file's path beside the token file: hidden from globs."""
    return path.with_name(f".{path.name}{SUFFIX}")


def in_cache(path: Path, status: os.stat_result, folder: Path, suffix: str) -> Path:
    """Return the path in a folder of the cache for what was computed from a file.

    Size and times are part of the name: hosts with a common cache may have different files under the same path.
    """
    key = f"{os.path.abspath(path)}\n{identity(status)}".encode(errors="surrogateescape")
    return folder / f"{xxhash.xxh3_64_hexdigest(key)}{suffix}"


def check_unchanged(path: Path, before: os.stat_result, after: os.stat_result) -> None:
    """Refuse a file that was written to between two reads of its status.

    Raises:
        DataError: the size or the time of modification differs.
    """
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise DataError(
            "A file of data was written to while it was read",
            where=path,
            expected=f"{before.st_size} bytes",
            found=f"{after.st_size} bytes, or another time of change",
            fix="Start again when no other program writes to it.",
        )


def identity(status: os.stat_result) -> str:
    """Return size and times of a file, by which it is the same later."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _line(digest: TokenDigest, status: os.stat_result) -> bytes:
    tokens = f"{digest.token_bytes} {digest.dtype} {digest.digest} {digest.largest}"
    text = f"reprise-digest 1 {identity(status)} {tokens}".encode("ascii")
    return text + b" " + xxhash.xxh3_64_hexdigest(text).encode("ascii") + b"\n"


def _read(place: Path, status: os.stat_result) -> TokenDigest | None:
    """Return the cached digest of a file with this status, or None."""
    try:
        line = _LINE.fullmatch(read_regular(place, limit_bytes=_MOST_BYTES, follows_links=False))
    except OSError:
        return None
    if line is None or xxhash.xxh3_64_hexdigest(line[1]) != line[9].decode():
        return None
    if " ".join(line[number].decode() for number in (2, 3, 4)) != identity(status):
        return None
    return TokenDigest(int(line[5]), line[6].decode(), line[7].decode(), int(line[8]))


def write_cached(place: Path, data: bytes, *, changed_ns: int) -> None:
    """Write what was computed from a file atomically, unless that file could still change unnoticed.

    A file that changes twice within one clock tick of its file system has the same times after both. If the result,
    written after the file was read, is not newer than the file's last change, it is discarded.

    Args:
        changed_ns: time of the last change of the status of the file.

    Raises:
        OSError: the path cannot be written.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(place, FileCalls(), replaces=True) as partial:
        partial.write_bytes(data)
        if partial.stat().st_mtime_ns <= changed_ns:
            partial.unlink()
