"""Keeps what was computed from a file of data, such as its digest, to spare the next start from reading it.

The digest of a token file lies beside it, or in the cache of prepared data if the folder is not writable. What is kept
is valid only for a file of the same size and times of change, to the nanosecond. The time of the last change of status
(``st_ctime``) cannot be set back, so an overwritten or replaced file is read again, even if its size and modification
time are the same. What is malformed is ignored and rewritten.

The first line has words, among them size and times of the file, and ends with the xxh3_64 of these and of the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from reprise.errors import DataError
from reprise.storage import FileCalls, atomic_output, read_regular
from trainer.data.data_file import DataFile
from trainer.data.fingerprint import TokenDigest, scan
from trainer.data.token_file import TokenFile

SUFFIX = ".digest"
_FOLDER = "digests"
_MOST_BYTES = 256 << 20


def digest_of(file: TokenFile, *, cache: Path, read_again: bool = False) -> TokenDigest:
    """Return the digest of a file, from the cache if it is valid, otherwise from its tokens, and cache it.

    Args:
        cache: folder for the digests of files in read-only folders.
        read_again: ignore the cache.

    Raises:
        DataError: the file cannot be read, or was written to meanwhile.
    """

    def compute() -> tuple[str, bytes]:
        digest = scan(file)
        return f"{digest.digest} {digest.largest}", b""

    places = (beside(file.path), in_cache(file.path, file.status(), cache / _FOLDER, SUFFIX))
    about = f"{file.nbytes} {file.dtype.name}"
    (digest, largest), _ = kept(file, places, "reprise-digest 1", about, compute, read_again=read_again)
    return TokenDigest(file.nbytes, file.dtype.name, digest, int(largest))


def kept(
    file: TokenFile | DataFile,
    places: Sequence[Path],
    form: str,
    about: str,
    compute: Callable[[], tuple[str, bytes]],
    *,
    read_again: bool = False,
) -> tuple[list[str], bytes]:
    """Return words and bytes computed from a file, from the first valid place, else computed and kept there.

    Args:
        places: in order; without a right to write the next is tried, and without any, the next start computes again.
        form: name and version of what is kept.
        about: what it depends on beside the file.
        read_again: ignore what is kept.

    Raises:
        DataError: as `compute`, or the file was written to meanwhile.
    """
    before = file.status()
    begin = f"{form} {identity(before)} {about} "
    for place in () if read_again else places:
        with contextlib.suppress(OSError):
            data = read_regular(place, limit_bytes=_MOST_BYTES, follows_links=False)
            line, end, content = data.partition(b"\n")
            text, _, digest = line.rpartition(b" ")
            if end and text.startswith(begin.encode()) and digest == _digest(text + content):
                return text[len(begin) :].decode().split(), content
    words, content = compute()
    after = file.status()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise DataError(
            "A file of data was written to while it was read",
            where=file.path,
            expected=f"{before.st_size} bytes",
            found=f"{after.st_size} bytes, or another time of change",
            fix="Start again when no other program writes to it.",
        )
    text = f"{begin}{words}".encode()
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, text + b" " + _digest(text + content) + b"\n" + content, changed_ns=after.st_ctime_ns)
            break
    return words.split(), content


def beside(path: Path) -> Path:
    """Return the digest file's path beside the token file: hidden from globs."""
    return path.with_name(f".{path.name}{SUFFIX}")


def in_cache(path: Path, status: os.stat_result, folder: Path, suffix: str) -> Path:
    """Return the path in a folder of the cache for what was computed from a file.

    Size and times are part of the name: hosts with a common cache may have different files under the same path.
    """
    key = f"{os.path.abspath(path)}\n{identity(status)}".encode(errors="surrogateescape")
    return folder / f"{xxhash.xxh3_64_hexdigest(key)}{suffix}"


def identity(status: os.stat_result) -> str:
    """Return size and times of a file, by which it is the same later."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(data).encode()


def _write(place: Path, data: bytes, *, changed_ns: int) -> None:
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
