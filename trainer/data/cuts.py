"""Tells where a tokenizer's texts may be cut, for tokens equal to those of the uncut text.

A place is behind a letter or digit of ASCII and before white space. It is safe if

* every component treats each side alike with and without the other, and keeps the letter or digit and the white space,
* and a pre-tokenizer separates the two: the model sees one piece at a time.

The components and patterns named here do so. A text of any other tokenizer is not cut.
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
    """Places at which a text may be cut.

    Args:
        pattern: matches up to the last of them.
        obstacle: the component of a tokenizer with which there are none.
    """

    pattern: re.Pattern[bytes]
    obstacle: str = ""

    def last(self, text: bytes | bytearray, start: int) -> int:
        """Return the last place in a text from byte `start` on; 0 if there is none."""
        match = self.pattern.match(text, start)
        return 0 if match is None else match.end()


ANYWHERE = Cuts(re.compile(rb"(?s:.*)"))
CHARACTERS = Cuts(re.compile(rb"(?s:.+)(?=[\x00-\x7f\xc0-\xff])"))  # of UTF-8
LINES = Cuts(re.compile(rb"(?s:.*)\n"))
WORDS = Cuts(re.compile(rb"(?s:.*)" + _SEAM.pattern.encode()))

# These map a character alone, or with those after it that combine with it, which no letter, digit or space does.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents"}
_WORDS, _NOTHING = frozenset({"letters", "digits"}), frozenset[str]()
# What these separate from white space behind it. The last three look at a single character at a time.
_SEPARATED = dict.fromkeys(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"), _WORDS)
_SEPARATED |= dict.fromkeys(("CharDelimiterSplit", "Digits", "Punctuation"), _NOTHING)
# These look at a piece alone, wherever it stands, so anything they do is safe behind a separation.
_BY_PIECE = {*_SEPARATED, "ByteLevel", "FixedLength", "Metaspace", "Split", "UnicodeScripts"}

# In an alternative of these patterns, nothing for white space comes after a letter or digit, and `(?!\S)`, their only
# assertion, holds before white space as at the end.
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
    """Return where the texts of a `tokenizers.Tokenizer` may be cut."""
    obstacle = _normalizer_obstacle(tokenizer) or _pre_tokenizer_obstacle(tokenizer) or _added_token_obstacle(tokenizer)
    return Cuts(re.compile(rb"(?!)"), obstacle) if obstacle else WORDS


def _members(component: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield a component, or the members of a sequence, as in a ``tokenizer.json``."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        table = waiting.pop()
        if table["type"] == "Sequence":
            waiting += reversed(table[key])
        else:
            yield table


def _normalizer_obstacle(tokenizer: Any) -> str:
    kinds = (table["type"] for table in _members(tokenizer.normalizer, "normalizers"))
    return next((f"normalizer {kind}" for kind in kinds if kind not in _NORMALIZERS), "")


def _pre_tokenizer_obstacle(tokenizer: Any) -> str:
    joined, kind = _WORDS, "null"
    for table in _members(tokenizer.pre_tokenizer, "pretokenizers"):
        kind = table["type"]
        is_safe = kind in _BY_PIECE and table.get("prepend_scheme") != "first"
        separated = _separated(table) if joined else _NOTHING if is_safe else None
        if separated is None:
            return f"pre_tokenizer {kind}"
        joined -= separated
    return f"pre_tokenizer {kind}" if joined else ""


def _separated(table: Mapping[str, Any]) -> frozenset[str] | None:
    """Return what is separated from white space behind it; None if the sides depend on each other."""
    match table:
        case {"type": "ByteLevel", "add_prefix_space": False} if table.get("use_regex", True):
            return _WORDS
        case {"type": "Split", "behavior": "Isolated" | "Removed", "pattern": {"Regex": pattern}}:
            return _PATTERNS.get(pattern)
        case _:
            return _SEPARATED.get(table["type"])


def _added_token_obstacle(tokenizer: Any) -> str:
    """Return an added token that could lie across a cut: they are looked for before and after the normalizer."""
    normalizer = tokenizer.normalizer
    for token in tokenizer.get_added_tokens_decoder().values():
        before, after = "a" * token.single_word, " " * token.rstrip  # these look at, or take, what is beside them
        for content in (
            token.content,
            token.content if normalizer is None else normalizer.normalize_str(token.content),
        ):
            if _SEAM.search(f"{before}{content}{after}"):
                return f"added token {token.content!r}"
    return ""
