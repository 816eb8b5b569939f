"""Encodes blocks in order, optionally on several processes, with a bounded number of blocks in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from reprise.errors import DataError
from trainer.data.blocks import TextBlock, TextForm, texts
from trainer.data.data_file import TokenArray
from trainer.data.text import Encoder, open_encoder
from trainer.workers import spawned_pool

# Blocks queued per process, to keep all processes busy.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block's tokens, including end-of-text tokens, and the number of documents ending in it."""

    tokens: TokenArray
    documents: int
    read_bytes: int


@contextmanager
def encoding(
    encoder: Encoder, tokenizer: str | Path, *, workers: int
) -> Iterator[Callable[[Iterable[TextBlock]], Iterator[Encoded]]]:
    """Yield a function that encodes blocks, in order, on `workers` processes; 1 means this process.

    If texts fail to encode, the function's error names the first in block order.

    Args:
        encoder: The tokenizer's encoder. Other processes open their own.
    """
    if workers == 1:
        yield partial(map, partial(encode_block, encoder=encoder))
        return
    pool = spawned_pool(workers)
    try:
        yield lambda blocks: in_order(
            (pool.submit(_encode, block, tokenizer) for block in blocks), most=workers * _AHEAD
        )
    finally:
        pool.shutdown(cancel_futures=True)


def encode_block(block: TextBlock, encoder: Encoder) -> Encoded:
    """Encode a block's texts, with an end-of-text token at each text's end.

    Raises:
        DataError: A text is malformed. The message names the file and the line, or the byte.
    """
    chunks: list[TokenArray] = [np.empty(0, np.uint16)]
    documents = 0
    for text in texts(block):
        chunks.append(encoder.encode(text))
        if block.part.form is TextForm.jsonl or block.ends_text:
            chunks.append(np.array([encoder.end_of_text], np.uint32))
            documents += 1
    return Encoded(np.concatenate(chunks).astype(encoder.dtype), documents, len(block.data))


def in_order(jobs: Iterable[Future[Encoded]], *, most: int) -> Iterator[Encoded]:
    """Yield job results in order. A job starts when taken from the iterable, at most `most` jobs ahead.

    Raises:
        DataError: A text cannot be encoded, or a process has died.
    """
    waiting = deque[Future[Encoded]]()
    try:
        for job in jobs:
            waiting.append(job)
            if len(waiting) == most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "An encoding process died", fix="Check whether memory ran out; --workers 1 uses the least."
        ) from error


def _encode(block: TextBlock, tokenizer: str | Path) -> Encoded:
    return encode_block(block, _opened_once(tokenizer))


_opened_once = cache(open_encoder)
