"""Finds where a text may be cut: its tokens are those of both sides, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from trainer.data.data_file import TokenArray

SIDE_BYTES = 1 << 10  # on each side of a cut, for a tokenizer's comparison


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a text may be cut.

    Args:
        pattern: Matches up to the last cut.
        encode: A tokenizer, which must give the same tokens for both sides alone as for both together. None allows
            every cut.
    """

    pattern: re.Pattern[bytes]
    encode: Callable[[str], TokenArray] | None = None

    def last(self, text: bytes | bytearray) -> int:
        """Return the last cut in a text, or 0 if the tokenizer allows none there."""
        encode = self.encode
        match = self.pattern.match(text, 0, len(text) - (SIDE_BYTES if encode else 0))
        place = 0 if match is None else match.end()
        if encode is None or not place:
            return place
        sides = text[max(0, place - SIDE_BYTES) : place], text[place : place + SIDE_BYTES]
        before, after, joined = (part.decode(errors="ignore") for part in (*sides, b"".join(sides)))
        if not after.strip():  # a normalizer may drop white space at the text's end alone
            return 0
        return place if [*encode(before).tolist(), *encode(after).tolist()] == encode(joined).tolist() else 0


CHARACTERS = Cuts(re.compile(rb"(?s:.+)(?=[\x00-\x7f\xc0-\xff])"))  # UTF-8 characters
LINES = Cuts(re.compile(rb"(?s:.*)\n"))
# Between a letter or digit and white space, which most tokenizers separate.
WORDS = Cuts(re.compile(rb"(?s:.*)[A-Za-z0-9](?=[ \t\r\n])"))
NOWHERE = Cuts(re.compile(rb"(?!)"))
