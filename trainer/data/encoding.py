"""Encodes blocks on several processes, in order, with a bounded number of blocks in memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from reprise.errors import DataError
from trainer.data.blocks import SplitRule, TextBlock, TextForm, texts
from trainer.data.text import Document, Encoder, open_encoder
from trainer.data.token_file import TokenArray

# Blocks that wait for each process, so that none waits for the file.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a block, including end-of-text tokens, and the number of documents with their end in the block."""

    tokens: TokenArray
    documents: int
    read_bytes: int


Encode = Callable[[Iterable[TextBlock], SplitRule], Iterator[Encoded]]


@contextmanager
def encoding(tokenizer: Path | None, *, workers: int) -> Iterator[Encode]:
    """Yield a function to encode blocks, in order, on `workers` processes; 1 means this process.

    The processes end with this process, even if it is killed. An error of the function names the first text, in block
    order, with a failure.
    """
    if workers == 1:
        encoder = open_encoder(tokenizer)
        yield lambda blocks, rule: (encode_block(block, rule, encoder) for block in blocks)
        return
    # A process that is forked beside a tokenizer's threads may hang: these begin anew.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)

    def submit(block: TextBlock, rule: SplitRule) -> Future[Encoded | str]:
        return pool.submit(_encode, block, rule, tokenizer)

    try:
        yield lambda blocks, rule: in_order((partial(submit, block, rule) for block in blocks), most=workers * _AHEAD)
    finally:
        pool.shutdown(cancel_futures=True)


def encode_block(block: TextBlock, rule: SplitRule, encoder: Encoder) -> Encoded:
    """Encode the texts of a block; the end of a text is followed by the end-of-text token.

    Raises:
        DataError: naming the file and the line, or the byte.
    """
    chunks: list[TokenArray] = [np.empty(0, np.uint16)]
    documents = 0
    for text in texts(block, rule):
        chunks.append(encoder.encode(Document(block.path, text, block.offset)))
        if rule.form is TextForm.jsonl or block.ends_text:
            chunks.append(np.array([encoder.end_of_text], np.uint32))
            documents += 1
    return Encoded(np.concatenate(chunks).astype(dtype_of(encoder)), documents, len(block.data))


def dtype_of(encoder: Encoder) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype of a token file for the encoder's tokens."""
    return np.dtype(np.uint16 if encoder.vocab_size <= 2**16 else np.uint32)


def in_order(starts: Iterable[Callable[[], Future[Encoded | str]]], *, most: int) -> Iterator[Encoded]:
    """Start jobs in order, at most `most` ahead, and yield their results in order.

    Raises:
        DataError: a text cannot be encoded, or a process has died.
    """
    waiting = deque[Future[Encoded | str]]()
    try:
        for start in starts:
            waiting.append(start())
            if len(waiting) == most:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    except BrokenProcessPool as error:
        raise DataError(
            "A process that makes tokens has died", fix="Look whether memory ran out; --workers 1 needs the least."
        ) from error


def _result(future: Future[Encoded | str]) -> Encoded:
    encoded = future.result()
    if isinstance(encoded, str):
        raise DataError(encoded.rstrip("."))
    return encoded


def _begin() -> None:
    """Initialize a worker process: it ends when its parent does, ignores the terminal's signals, and logs nothing."""
    logging.disable()  # the parent opens the same tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(block: TextBlock, rule: SplitRule, tokenizer: Path | None) -> Encoded | str:
    try:
        return encode_block(block, rule, _opened_once(tokenizer))
    except DataError as error:
        return str(error)


_opened_once = cache(open_encoder)
