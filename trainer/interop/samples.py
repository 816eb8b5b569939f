"""The identity of weight files of another program, without reading all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from reprise.storage import open_regular

# So many extents of a file are digested, each of so many bytes.
_SAMPLES, _SAMPLE_BYTES = 16, 256 << 10


def digest_of_samples(files: Iterable[Path]) -> bytes:
    """Return the XXH3 digest of the names and sizes of files, and of samples of each from its first to its last bytes.

    A file of up to 256 KiB is read whole, and the headers of larger files are in their first sample.

    Args:
        files: in the same order everywhere; only the last part of a path counts.
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
