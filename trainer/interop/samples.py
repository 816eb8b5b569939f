"""Identifies another program's weight files without reading them in full."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from reprise.storage import open_regular

# How many samples each file has, and their size in bytes.
_SAMPLES, _SAMPLE_BYTES = 16, 256 << 10


def digest_of_samples(files: Iterable[Path]) -> bytes:
    """Return the XXH3 digest of file names, sizes and samples, which cover each file from its first to its last byte.

    A file of up to 256 KiB is read in full. A larger file's header is in its first sample.

    Args:
        files: The files, in the same order on every host. Only a path's last component counts.
    """
    hasher = xxhash.xxh3_64()
    for path in files:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(f"{path.name} {size}\n".encode())
            last = max(0, size - _SAMPLE_BYTES)
            for at in sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)}):
                hasher.update(os.pread(file.fileno(), _SAMPLE_BYTES, at))
    return hasher.digest()
