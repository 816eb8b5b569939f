"""The byte tokenizer as a ``tokenizer.json``, from which other programs produce the same tokens.

Source: GPT-2's vocabulary, `bytes_to_unicode` in its encoder.py, for the bytes' characters.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256


@cache
def bytes_tokenizer() -> bytes:
    """Return the ``tokenizer.json`` with bytes 0 to 255 as tokens and 256 as end of text."""
    return Path(__file__).with_name("bytes_tokenizer.json").read_bytes()
