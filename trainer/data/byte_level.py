"""The tokenizer of bytes as a ``tokenizer.json``, for other programs to produce the same tokens.

Source: the vocabulary of GPT-2, `bytes_to_unicode` of its encoder.py, for the characters of bytes.
"""

from __future__ import annotations

import json
from functools import cache

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256


@cache
def bytes_tokenizer() -> bytes:
    """Return the ``tokenizer.json`` whose tokens are the bytes 0 to 255 and whose end of text is 256."""
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
    """Return the character for each byte: a printable byte itself, any other a character from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(substitutes)) for byte in range(256)]
