"""A byte-level BPE tokenizer, like GPT-2's, trained on texts."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer

from trainer.data.byte_level import END_OF_TEXT


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a ``tokenizer.json`` with at most so many tokens; token 0 is the end of text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT])
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()
