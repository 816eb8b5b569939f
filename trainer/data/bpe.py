"""Trains a byte-level BPE tokenizer on texts, like GPT-2's: any text's tokens decode to the same text.

Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners", section 2.2, for bytes as its alphabet.
"""

from __future__ import annotations

from collections.abc import Iterable

from reprise.errors import DataError
from trainer.data.text import END_OF_TEXT_NAMES

# The bytes and the end of text.
LEAST_TOKENS = 257


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train and return a ``tokenizer.json`` with at most `vocab_size` tokens; token 0 is the end of text.

    The result depends only on the texts. Memory holds a single text and all distinct words.

    Raises:
        DataError: The `tokenizers` package is missing, or the vocabulary is too small for all bytes.
    """
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as error:
        raise DataError("train-bpe needs the tokenizers package", fix="Install it: pip install tokenizers.") from error
    if vocab_size < LEAST_TOKENS:
        raise DataError(
            "The vocabulary is too small", expected=f"at least {LEAST_TOKENS}: bytes and end of text", found=vocab_size
        )
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT_NAMES[0]]
    )
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()
