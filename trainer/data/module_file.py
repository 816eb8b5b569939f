"""Samples from a user's map-style object, presented as a token file with the samples as its windows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reprise.errors import DataError
from trainer.data.data_file import TokenArray
from trainer.data.documents import PADDED
from trainer.data.fingerprint import TokenDigest
from trainer.data.token_file import TokenFile

SAMPLES = "samples"  # in place of a dtype


class ModuleFile(TokenFile):
    """The samples a factory returns for a path: sample n is the window at token n * seq_length.

    Args:
        factory: `package:function`. The function takes a path from the configuration and returns an object with
            `__len__` and `__getitem__`, and a text naming its content. An item has 2 to `seq_length` + 1 tokens, or is
            a pair with these and a mask, false where a token is not a target.
        vocab_size: Upper bound for tokens, exclusive.

    Attributes:
        digest: Digest over the text naming the content, with the sample count.

    Raises:
        DataError: The factory cannot be imported, or returns another object.
    """

    def __init__(self, path: Path, *, factory: str, seq_length: int, vocab_size: int) -> None:
        self.path, self.documents = path, None
        self._where, self._seq_length, self._vocab_size = f"data.factory={factory}", seq_length, vocab_size
        module, _, name = factory.partition(":")
        try:
            make = getattr(import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise DataError(
                "The sample factory cannot be imported",
                where=self._where,
                expected="package:function",
                found=error,
                fix="Correct data.factory, or add its folder to PYTHONPATH.",
            ) from error
        match make(str(path)):
            case (samples, str(content)) if content and hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
                pass
            case other:
                parts = other if isinstance(other, tuple) else [other]
                raise DataError(
                    "The sample factory must return samples and their fingerprint",
                    where=self._where,
                    expected="a pair: an object with __len__ and __getitem__, and a text that identifies its content",
                    found=" and ".join(type(part).__name__ for part in parts),
                    fix="The trainer reads each sample by its position in the run and does not save iterator state. To "
                    "train on an iterable, write your own loop: wrap it in a StatefulDataLoader and save each rank's "
                    "state, per_rank={'loader': loader.state_dict()} (docs/library.md).",
                )
        self._samples: Any = samples
        self.count = len(samples) * seq_length + 1
        self.digest = TokenDigest(len(samples), SAMPLES, xxhash.xxh3_64_hexdigest(content.encode()), -1)

    def read(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return the window at token `start`, int64 [seq_length + 1]. `PADDED` marks positions that are not targets.

        Raises:
            DataError: The sample does not fit the run.
        """
        number, length = start // self._seq_length, self._seq_length + 1
        item = self._samples[number]
        tokens, mask = map(np.asarray, item if isinstance(item, tuple) else (item, np.ones(len(item), bool)))
        is_row = tokens.ndim == 1 and tokens.dtype.kind in "iu" and 1 < tokens.size <= length
        is_valid = is_row and tokens.min() >= 0 and tokens.max() < self._vocab_size
        if not (is_valid and mask.shape == tokens.shape and mask[1:].any()):
            values = f", {tokens.min()} to {tokens.max()}" if is_row else ""
            raise DataError(
                "A sample is invalid for this run",
                where=f"{self._where}, sample {number} of {self.path}",
                expected=f"2 to {length} tokens (train.seq_length + 1), integers from 0 to {self._vocab_size - 1}, and "
                "a mask of the same length, nonzero somewhere after its first entry",
                found=f"{tokens.dtype} {list(tokens.shape)}{values}, a mask {list(mask.shape)}",
            )
        window = np.full(length, PADDED, np.int64)
        window[: tokens.size] = tokens.astype(np.int64) | np.where(mask, 0, PADDED)
        return window
