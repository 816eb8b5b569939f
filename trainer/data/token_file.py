"""Token files: a 1024-byte header and a flat array of tokens, read with pread and never mapped into memory.

The format is that of llm.c (``dev/data/data_common.py``, ``write_datafile``): 256 little-endian int32 values ``[magic,
version, n_tokens, 0, ...]``, then the tokens.

Truncating a mapped file ends the process with SIGBUS and without a message; pread returns fewer bytes.
"""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from reprise.errors import DataError, count_of
from reprise.files import FileCalls, atomic_output, open_regular
from trainer.data.document_index import DocumentIndex, unreadable

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]

HEADER_BYTES = 256 * 4
# The count is an int32 in the header.
MAX_TOKENS = 2**31 - 1
_MOST_LISTED = 20
_OTHER_DESCRIPTORS = 1024  # what the rest of a rank may have open


@dataclass(frozen=True, slots=True)
class _Format:
    magic: int
    version: int
    dtype: np.dtype[Any]


# llm.c, dev/data/data_common.py, HEADERS_INFO: "gpt-2" and "llama-3".
_FORMATS = (
    _Format(magic=20240520, version=1, dtype=np.dtype("<u2")),
    _Format(magic=20240801, version=7, dtype=np.dtype("<u4")),
)
# What the first two int32 of a token file are.
MAGICS = tuple((form.magic, form.version) for form in _FORMATS)


class TokenFile:
    """An open token file of `count` tokens, uint16 or uint32.

    The descriptor stays open, so if the file is replaced under the same name, the old tokens are still read.

    Args:
        first_byte: where the tokens begin.
        documents: where documents begin, from a file beside it.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        count: int,
        descriptor: int,
        *,
        first_byte: int = HEADER_BYTES,
        documents: DocumentIndex | None = None,
    ) -> None:
        self.path, self.dtype, self.count, self.documents = path, dtype, count, documents
        self._descriptor, self._first_byte = descriptor, first_byte
        weakref.finalize(self, os.close, descriptor)

    @property
    def nbytes(self) -> int:
        """Return the size of the tokens in bytes, without the header."""
        return self.count * self.dtype.itemsize

    def status(self) -> os.stat_result:
        """Return the status of the open file."""
        return os.fstat(self._descriptor)

    def read(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return a copy of tokens `start` to `stop` - 1, by default all; shape [stop - start].

        Raises:
            DataError: the file was truncated after it was opened, or cannot be read.
            IndexError: the file never had such tokens.
        """
        stop = self.count if stop is None else stop
        if not 0 <= start <= stop <= self.count:
            raise IndexError(f"expected tokens in range({self.count}), found {start} to {stop}")
        tokens = np.empty(stop - start, dtype=self.dtype)
        unread, at = tokens.view(np.uint8).data, self._first_byte + start * self.dtype.itemsize
        while unread.nbytes:
            try:
                read_bytes = os.preadv(self._descriptor, [unread], at)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not read_bytes:
                raise self._cut()
            unread, at = unread[read_bytes:], at + read_bytes
        return tokens

    def _cut(self) -> DataError:
        return DataError(
            "A token file was cut while it was in use",
            where=self.path,
            expected=f"{self._first_byte + self.nbytes} bytes",
            found=f"{self.status().st_size} bytes",
            fix="Write or copy it again, and start again when no other program writes to it.",
        )


def listed(paths: Sequence[Path]) -> str:
    """Return paths as words; of many, the first and the number of the rest."""
    more = f" and {len(paths) - _MOST_LISTED} more" if len(paths) > _MOST_LISTED else ""
    return ", ".join(map(str, paths[:_MOST_LISTED])) + more


def open_token_file(path: str | Path) -> TokenFile:
    """Open a token file and check its header and size.

    Raises:
        DataError: the file cannot be read, has another magic or version, or its size contradicts its header.
    """
    path = Path(path)
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        size = os.fstat(descriptor).st_size
        form, count = _check_header(path, os.pread(descriptor, HEADER_BYTES, 0), size)
    except OSError as error:
        os.close(descriptor)
        raise unreadable(path, error) from error
    except DataError:
        os.close(descriptor)
        raise
    return TokenFile(path, form.dtype, count, descriptor)


def open_token_files(
    paths: Sequence[Path], open_file: Callable[[Path], TokenFile] = open_token_file
) -> list[TokenFile]:
    """Open all files of a data set, raising this process's soft limit of open files if necessary.

    Args:
        open_file: opens a file of the set.

    Raises:
        DataError: as `open_file`, or the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_descriptors = len(os.listdir("/proc/self/fd")) + 2 * len(paths) + _OTHER_DESCRIPTORS
    if resource.RLIM_INFINITY not in (soft, hard) and soft < needed_descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed_descriptors, hard), hard))
    return [open_file(path) for path in paths]


def write_token_file(path: str | Path, chunks: Iterable[TokenArray], *, dtype: npt.DTypeLike) -> None:
    """Write the chunks in order as a token file, atomically.

    Processes may race to write the same content. ``chunks`` are 1-D arrays of any integer dtype; memory holds a single
    chunk.

    Raises:
        DataError: a token does not fit ``dtype``, there are more than 2**31 - 1 tokens, or the file system fails.
        ValueError: ``dtype`` is neither uint16 nor uint32, or a chunk is not a 1-D array of integers.
    """
    path = Path(path)
    form = next((form for form in _FORMATS if form.dtype == np.dtype(dtype).newbyteorder("<")), None)
    if form is None:
        raise ValueError(f"token files hold uint16 or uint32, not {np.dtype(dtype)}")
    try:
        with atomic_output(path, FileCalls(), replaces=True) as partial, partial.open("xb") as file:
            _write_tokens(path, file, chunks, form)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(
            "a token file cannot be written",
            where=path,
            found=error.strerror or str(error),
            fix="Check space and permissions, or name another folder.",
        ) from error


def _check_header(path: Path, header: bytes, size_bytes: int) -> tuple[_Format, int]:
    if len(header) < HEADER_BYTES:
        raise DataError(
            "a token file is shorter than its header",
            where=path,
            expected=f"at least {HEADER_BYTES} bytes",
            found=f"{size_bytes} bytes",
            fix="It is not a token file, or was cut off: write or copy it again.",
        )
    magic, version, count = (int(value) for value in np.frombuffer(header, dtype="<i4", count=3))
    form = next((form for form in _FORMATS if (form.magic, form.version) == (magic, version)), None)
    if form is None:
        formats = " or ".join(f"magic {form.magic} version {form.version} ({form.dtype.name})" for form in _FORMATS)
        raise DataError(
            "a token file has an unknown header",
            where=path,
            expected=formats,
            found=f"magic {magic} version {version}",
            fix="Write it again with this header of 256 int32 values; of arrays without one `prepare_data --raw` does. "
            "Files of datatrove are data=datatrove, those of Megatron data=megatron.",
        )
    body_bytes = size_bytes - HEADER_BYTES
    if body_bytes != count * form.dtype.itemsize:
        tokens, trailing_bytes = divmod(body_bytes, form.dtype.itemsize)
        raise DataError(
            "the size of a token file differs from its header",
            where=path,
            expected=f"{count_of(count, 'token')} of {form.dtype.itemsize} bytes",
            found=count_of(tokens, "token")
            + (f" and {count_of(trailing_bytes, 'odd byte')}" if trailing_bytes else ""),
            fix="It was cut off or appended to: write or copy it again.",
        )
    return form, count


def _write_tokens(path: Path, file: BinaryIO, chunks: Iterable[TokenArray], form: _Format) -> None:
    file.write(bytes(HEADER_BYTES))
    limit = int(np.iinfo(form.dtype).max)
    count = 0
    for chunk in chunks:
        if chunk.ndim != 1 or chunk.dtype.kind not in "iu":
            raise ValueError(f"expected 1-D arrays of integers, found {chunk.ndim}-D {chunk.dtype}")
        if not chunk.size:
            continue
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high > limit:
            raise DataError(
                "a token does not fit its file",
                where=path,
                expected=f"0 to {limit} ({form.dtype.name})",
                found=low if low < 0 else high,
                fix="Use uint32 for vocabularies above 65536.",
            )
        count += chunk.size
        if count > MAX_TOKENS:
            raise DataError(
                "a token file would hold too many tokens",
                where=path,
                expected=f"at most {MAX_TOKENS}",
                found=f"at least {count}",
                fix="Write several files; a data set is a list of files.",
            )
        file.write(np.ascontiguousarray(chunk, dtype=form.dtype).data)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = (form.magic, form.version, count)
    file.seek(0)
    file.write(header.tobytes())
