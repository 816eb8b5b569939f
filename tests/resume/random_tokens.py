"""Token files of random samples, which a test tells apart by their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.token_file import write_token_file

SIZES = {"a": 30, "b": 41, "c": 17}  # in samples
LENGTH = 16


def random_tokens() -> dict[str, np.ndarray[Any, Any]]:
    """Return the tokens of each file by its name, each of shape `[samples * LENGTH + 1]`."""
    rng = np.random.default_rng(3)
    return {name: rng.integers(0, 257, size * LENGTH + 1) for name, size in SIZES.items()}


def write_random_tokens(folder: Path) -> None:
    """Write the files `a.bin`, `b.bin` and `c.bin` of a vocabulary of 257 tokens."""
    for name, tokens in random_tokens().items():
        write_token_file(folder / f"{name}.bin", [tokens], dtype=np.uint16)
