"""Token files: a 1024-byte header and a flat array of tokens, opened as a read-only memory map.

The format is that of llm.c (``dev/data/data_common.py``, ``write_datafile``): 256 little-endian int32 values
``[magic, version, n_tokens, 0, ...]``, then the tokens. How tokens come from text is not decided here.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from trainer.errors import DataError

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]

HEADER_BYTES = 256 * 4
# The count is an int32 in the header.
MAX_TOKENS = 2**31 - 1
_SCAN_TOKENS = 4 * 2**20


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


@dataclass(frozen=True, slots=True, eq=False)
class TokenFile:
    """One open token file; ``tokens`` is a read-only 1-D view of the mapped file, uint16 or uint32."""

    path: Path
    dtype: np.dtype[Any]
    tokens: TokenArray


def open_token_file(path: str | Path) -> TokenFile:
    """Map the tokens of a file, after its header and size were checked.

    Raises:
        DataError: the file cannot be read, has another magic or version, or its size is not what its header says.
    """
    path = Path(path)
    try:
        # What is no regular file, a pipe for one, may keep whoever opens it waiting for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            # Touching a map behind the end of its file kills the process (SIGBUS), so the size is checked first.
            form, count = _check_header(path, file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size)
            mapped = np.memmap(file, dtype=form.dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    except OSError as error:
        raise DataError(
            "a token file cannot be read",
            where=path,
            expected="a readable file",
            found=error.strerror or str(error),
            fix="Check data.train and data.valid, or write the file again.",
        ) from error
    return TokenFile(path=path, dtype=form.dtype, tokens=np.asarray(mapped))


def write_token_file(path: str | Path, chunks: Iterable[TokenArray], *, dtype: npt.DTypeLike) -> None:
    """Write the chunks, one after the other, as one token file that appears whole or not at all.

    The file is written under a temporary name in the same folder, made durable and renamed, so processes that race to
    write the same content do no harm. ``chunks`` are 1-D arrays of any integer dtype and are held one at a time.

    Raises:
        DataError: a token does not fit ``dtype``, there are more than 2**31 - 1 tokens, or the file system refuses.
        ValueError: ``dtype`` is neither uint16 nor uint32, or a chunk is not a 1-D array of integers.
    """
    path = Path(path)
    form = next((form for form in _FORMATS if form.dtype == np.dtype(dtype).newbyteorder("<")), None)
    if form is None:
        raise ValueError(f"token files hold uint16 or uint32, not {np.dtype(dtype)}")
    # The nonce keeps hosts apart that share the folder and happen to use the same process id.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            _write_tokens(path, file, chunks, form)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            "a token file cannot be written",
            where=path,
            found=error.strerror or str(error),
            fix="Check space and permissions, or name another folder.",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_tokens(file: TokenFile, vocab_size: int) -> None:
    """Read the whole file and refuse a token that a model of ``vocab_size`` rows cannot embed.

    Raises:
        DataError: a token is not below ``vocab_size``; names file, position and token.
    """
    for start, chunk in _scan_chunks(file):
        _check_chunk(file, start, chunk, vocab_size=vocab_size)


def scan(file: TokenFile, vocab_size: int | None) -> str:
    """Read the whole file once: check its tokens as `check_tokens` does and return the digest of its content.

    With ``vocab_size`` None only the digest is computed. The digest is 16 hex digits, xxh3_64 of the token bytes.

    Raises:
        DataError: a token is not below ``vocab_size``.
    """
    digest = xxhash.xxh3_64()
    for start, chunk in _scan_chunks(file):
        if vocab_size is not None:
            _check_chunk(file, start, chunk, vocab_size=vocab_size)
        digest.update(chunk.data)
    return digest.hexdigest()


def fingerprint(files: Sequence[TokenFile], *, vocab_size: int | None = None) -> str:
    """Return 16 hex digits for the content of the files in this order, whatever their paths.

    xxh3_64 over one line ``<bytes> <dtype> <content digest>`` a file. Reads each file once, checking it against
    ``vocab_size`` on the way (see `scan`).

    Raises:
        DataError: a token is not below ``vocab_size``.
    """
    digest = xxhash.xxh3_64()
    for file in files:
        line = f"{file.tokens.nbytes} {file.dtype.name} {scan(file, vocab_size)}\n"
        digest.update(line.encode("ascii"))
    return digest.hexdigest()


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
        known = " or ".join(f"magic {form.magic} version {form.version} ({form.dtype.name})" for form in _FORMATS)
        raise DataError(
            "a token file has an unknown header",
            where=path,
            expected=known,
            found=f"magic {magic} version {version}",
            fix="Write it again with this header of 256 int32 values; raw arrays without a header are not read.",
        )
    body_bytes = size_bytes - HEADER_BYTES
    if body_bytes != count * form.dtype.itemsize:
        whole, rest = divmod(body_bytes, form.dtype.itemsize)
        raise DataError(
            "the size of a token file is not what its header says",
            where=path,
            expected=f"{count} tokens of {form.dtype.itemsize} bytes",
            found=f"{whole} tokens" + (f" and {rest} odd bytes" if rest else ""),
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


def _scan_chunks(file: TokenFile) -> Iterator[tuple[int, TokenArray]]:
    for start in range(0, file.tokens.size, _SCAN_TOKENS):
        yield start, file.tokens[start : start + _SCAN_TOKENS]


def _check_chunk(file: TokenFile, start: int, chunk: TokenArray, *, vocab_size: int) -> None:
    if int(chunk.max()) < vocab_size:
        return
    offset = int(np.argmax(chunk >= vocab_size))
    raise DataError(
        "a token is outside the vocabulary of the model",
        where=f"{file.path}, position {start + offset}",
        expected=f"0 to {vocab_size - 1}",
        found=int(chunk[offset]),
        fix="Set the vocabulary size of the tokenizer that wrote the file.",
    )
