"""Finds where to cut a tokenizer's texts without changing the tokens.

A cut comes after an ASCII letter or digit and before white space. It is safe if

* every component treats each side the same with and without the other, and keeps the letter or digit and the white
  space,
* and a pre-tokenizer separates the two: the model sees one piece at a time.

This holds for the components and patterns listed here. Texts for any other tokenizer are not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SEAM = re.compile(r"[A-Za-z0-9](?=[ \t\r\n])")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a text may be cut.

    Args:
        pattern: Matches up to the last cut.
        obstacle: The tokenizer component that rules out cuts, if any.
    """

    pattern: re.Pattern[bytes]
    obstacle: str = ""

    def last(self, text: bytes | bytearray, start: int) -> int:
        """Return the last cut in a text from byte `start` on, or 0."""
        match = self.pattern.match(text, start)
        return 0 if match is None else match.end()


CHARACTERS = Cuts(re.compile(rb"(?s:.+)(?=[\x00-\x7f\xc0-\xff])"))  # UTF-8 characters
LINES = Cuts(re.compile(rb"(?s:.*)\n"))
WORDS = Cuts(re.compile(rb"(?s:.*)" + _SEAM.pattern.encode()))

# These map a character alone or with the combining characters after it. Letters, digits and spaces do not combine.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents"}
_WORDS, _NOTHING = frozenset({"letters", "digits"}), frozenset[str]()
# What these separate from following white space. The last three look at a single character at a time.
_SEPARATED = dict.fromkeys(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"), _WORDS)
_SEPARATED |= dict.fromkeys(("CharDelimiterSplit", "Digits", "Punctuation"), _NOTHING)
# These look at each piece alone, whatever its position, so they are safe after a separation.
_BY_PIECE = {*_SEPARATED, "ByteLevel", "FixedLength", "Metaspace", "Split", "UnicodeScripts"}

# In these patterns' alternatives, no white space follows a letter or digit, and the only assertion, `(?!\S)`, treats a
# cut before white space like the end of the text.
_PATTERNS = {
    # GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _WORDS,
    # GPT-4 and LLaMA-3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": _WORDS,
    # Qwen.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+": _WORDS,
    # GPT-4o.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _WORDS,
    # Mistral.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _WORDS,
    # DeepSeek, one after the other.
    r"\p{N}{1,3}": frozenset({"digits"}),
    "[一-龥\u3040-\u30ff]+": _NOTHING,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": frozenset({"letters"}),
}


def cuts_of(tokenizer: Any) -> Cuts:
    """Return where a `tokenizers.Tokenizer` allows cuts."""
    obstacle = next(_obstacles(tokenizer), "")
    return Cuts(re.compile(rb"(?!)"), obstacle) if obstacle else WORDS


def _obstacles(tokenizer: Any) -> Iterator[str]:
    """Yield the components, in order, that could treat the sides of a cut differently."""
    for table in _members(tokenizer.normalizer, "normalizers"):
        if table["type"] not in _NORMALIZERS:
            yield f"normalizer {table['type']}"
    joined, kind = _WORDS, "null"
    for table in _members(tokenizer.pre_tokenizer, "pretokenizers"):
        kind = table["type"]
        is_safe = kind in _BY_PIECE and table.get("prepend_scheme") != "first"
        separated = _separated(table) if joined else _NOTHING if is_safe else None
        if separated is None:
            yield f"pre_tokenizer {kind}"
        else:
            joined -= separated
    if joined:
        yield f"pre_tokenizer {kind}"
    # Added tokens are matched before and after normalization.
    normalized = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    for token in tokenizer.get_added_tokens_decoder().values():
        before, after = "a" * token.single_word, " " * token.rstrip  # these flags inspect, or consume, neighboring text
        for content in (token.content, normalized(token.content)):
            if _SEAM.search(f"{before}{content}{after}"):
                yield f"added token {token.content!r}"


def _members(component: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield a component, or a sequence's members, as in a ``tokenizer.json``."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        table = waiting.pop()
        if table["type"] == "Sequence":
            waiting += reversed(table[key])
        else:
            yield table


def _separated(table: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the character classes separated from following white space. None if the sides depend on each other."""
    match table:
        case {"type": "ByteLevel", "add_prefix_space": False} if table.get("use_regex", True):
            return _WORDS
        case {"type": "Split", "behavior": "Isolated" | "Removed", "pattern": {"Regex": pattern}}:
            return _PATTERNS.get(pattern)
        case _:
            return _SEPARATED.get(table["type"])
