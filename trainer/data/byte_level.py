"""The byte tokenizer as a ``tokenizer.json``, from which other programs produce the same tokens.

Source: GPT-2's vocabulary, `bytes_to_unicode` in its encoder.py, for the bytes' characters.
"""

from __future__ import annotations

import json
from functools import cache

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256


@cache
def bytes_tokenizer() -> bytes:
    """Return the ``tokenizer.json`` with bytes 0 to 255 as tokens and 256 as end of text."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": END_OF_TEXT_ID, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    document: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _characters() -> list[str]:
    """Return each byte's character: a printable byte stays itself, any other maps to a character from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(substitutes)) for byte in range(256)]
