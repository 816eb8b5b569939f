"""Token identity in 16 hex digits: a file's digest, and a data set's fingerprint.

Invariant: values never change between versions, or running jobs could not find their data again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from trainer.data.token_file import TokenFile


@dataclass(frozen=True, slots=True)
class TokenDigest:
    """A digest of a file's tokens.

    Args:
        token_bytes: Token size in bytes, without the header.
        dtype: uint16 or uint32.
        digest: 16 hex digits, xxh3_64 over the token bytes.
        largest: The largest token. -1 if there are no tokens.
    """

    token_bytes: int
    dtype: str
    digest: str
    largest: int


def scan(file: TokenFile) -> TokenDigest:
    """Read a file's tokens once and return their digest.

    Raises:
        DataError: The file cannot be read to its end.
    """
    digest, largest = xxhash.xxh3_64(), -1
    for chunk in file.chunks():
        digest.update(chunk.data)
        largest = max(largest, int(chunk.max()))
    return TokenDigest(file.nbytes, file.dtype.name, digest.hexdigest(), largest)


def fingerprint(digests: Sequence[TokenDigest]) -> str:
    """Return 16 hex digits for the files' content in this order, independent of their paths.

    It is xxh3_64 over a line ``<bytes> <dtype> <content digest>`` per file.
    """
    hasher = xxhash.xxh3_64()
    for digest in digests:
        hasher.update(f"{digest.token_bytes} {digest.dtype} {digest.digest}\n".encode("ascii"))
    return hasher.hexdigest()


def fingerprint_of_sources(fingerprints: Sequence[str]) -> str:
    """Return a single source's fingerprint, or for several in this order 16 hex digits: xxh3_64 over a line each."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return xxhash.xxh3_64_hexdigest("".join(f"{value}\n" for value in fingerprints).encode("ascii"))
