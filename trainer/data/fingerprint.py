"""The identity of tokens in 16 hex digits: the digest of a file, and the fingerprint of a data set.

Invariant: the values never change between versions, or no run in flight would find its data again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from reprise.errors import DataError
from trainer.data.data_file import TokenArray
from trainer.data.token_file import TokenFile

_SCAN_TOKENS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class TokenDigest:
    """The tokens of a file in brief.

    Args:
        token_bytes: size of the tokens, without the header.
        dtype: uint16 or uint32.
        digest: 16 hex digits, xxh3_64 of the token bytes.
        largest: the largest token; -1 if there is none.
    """

    token_bytes: int
    dtype: str
    digest: str
    largest: int


def scan(file: TokenFile) -> TokenDigest:
    """Read all tokens of a file once and return their digest.

    Raises:
        DataError: the file cannot be read to its end.
    """
    digest, largest = xxhash.xxh3_64(), -1
    for _, chunk in _chunks(file):
        digest.update(chunk.data)
        largest = max(largest, int(chunk.max()))
    return TokenDigest(file.nbytes, file.dtype.name, digest.hexdigest(), largest)


def fingerprint(digests: Sequence[TokenDigest]) -> str:
    """Return 16 hex digits for the content of files in this order, independent of their paths.

    xxh3_64 over a line ``<bytes> <dtype> <content digest>`` a file.
    """
    hasher = xxhash.xxh3_64()
    for digest in digests:
        hasher.update(f"{digest.token_bytes} {digest.dtype} {digest.digest}\n".encode("ascii"))
    return hasher.hexdigest()


def fingerprint_of_sources(fingerprints: Sequence[str]) -> str:
    """Return the fingerprint of a source, or 16 hex digits for several in this order: xxh3_64 over a line each."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return xxhash.xxh3_64_hexdigest("".join(f"{value}\n" for value in fingerprints).encode("ascii"))


def check_tokens(file: TokenFile, vocab_size: int) -> None:
    """Read all tokens of a file and refuse any above the ``vocab_size`` rows of a model's embedding.

    Raises:
        DataError: a token is not below ``vocab_size``; names file, position and token.
    """
    for start, chunk in _chunks(file):
        if int(chunk.max()) >= vocab_size:
            offset = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                "a token is outside the vocabulary of the model",
                where=f"{file.path}, position {start + offset}",
                expected=f"0 to {vocab_size - 1}",
                found=int(chunk[offset]),
                fix="Set the vocabulary size of the tokenizer that wrote the file.",
            )


def _chunks(file: TokenFile) -> Iterator[tuple[int, TokenArray]]:
    for start in range(0, file.count, _SCAN_TOKENS):
        yield start, file.read(start, min(start + _SCAN_TOKENS, file.count))
