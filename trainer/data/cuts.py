"""Tells where a tokenizer's texts may be cut, for tokens equal to those of the uncut text.

A place is behind a letter or digit of ASCII and before white space. It is safe if

* every component treats each side alike with and without the other, and keeps the letter or digit and the white space,
* and a pre-tokenizer separates the two: the model sees one piece at a time.

The components named here do so, and the patterns for which `_keeps_apart` holds. A text of any other tokenizer is not
cut.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_WORD, _SPACE = string.ascii_letters + string.digits, " \t\r\n"
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
# These look at a single character at a time.
_BY_CHARACTER = {"CharDelimiterSplit", "Digits", "Punctuation"}
_AT_WHITE_SPACE = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# These look at a piece alone, wherever it stands, so anything they do is safe behind a separation.
_BY_PIECE = _BY_CHARACTER | _AT_WHITE_SPACE | {"ByteLevel", "FixedLength", "Metaspace", "Split", "UnicodeScripts"}

_CLASS = r"\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w]"
_TIMES = r"(?:[?*+]|\{\d*,?\d*\})*"
_PARTS = re.compile(
    rf"(?P<atom>{_CLASS}|\[\^?(?:{_CLASS}|&(?!&)|[^\\\[\]&])+\]|[^\\()\[\]{{}}|?*+^$])(?P<times>{_TIMES})"
    rf"|(?P<open>\((?:\?i?:|(?![?*])))|(?P<close>\){_TIMES})|(?P<bar>\|)|\(\?!\\S\)"
)


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
    joined, kind = set(_WORD), "null"
    for table in _members(tokenizer.pre_tokenizer, "pretokenizers"):
        kind = table["type"]
        if joined:
            separated = _separated(table)
        elif kind in _BY_PIECE and table.get("prepend_scheme") != "first":
            separated = set()
        else:
            separated = None
        if separated is None:
            return f"pre_tokenizer {kind}"
        joined -= separated
    return f"pre_tokenizer {kind}" if joined else ""


def _separated(table: Mapping[str, Any]) -> set[str] | None:
    """Return the letters and digits separated from white space behind them; None if the sides depend on each other."""
    match table:
        case {"type": kind} if kind in _AT_WHITE_SPACE:
            return set(_WORD)
        case {"type": kind} if kind in _BY_CHARACTER:
            return set()
        case {"type": "ByteLevel", "add_prefix_space": False} if table.get("use_regex", True):
            return set(_WORD)
        case {"type": "Split", "behavior": "Isolated" | "Removed", "pattern": {"Regex": pattern}}:
            return {letter for letter in _WORD if not _rest(pattern, letter)} if _keeps_apart(pattern) else None
        case {"type": "Split", "behavior": "Isolated" | "Removed", "pattern": {"String": text}}:
            return set() if _SEAM.search(text) is None else None
        case _:
            return None


def _keeps_apart(pattern: str) -> bool:
    """Return whether a pattern's matches depend on one side of a cut alone.

    It is so if, in each alternative, nothing for white space comes after something for a letter or digit, and the only
    assertion is `(?!\\S)`, which holds before white space as at the end. Then a search that has passed the letter
    or digit fails at white space as it fails at the end, and none looks back.
    """
    parts = list(_PARTS.finditer(pattern))
    folds = "(?i" in pattern and not pattern.isascii()  # one character may stand for two others
    if folds or "".join(part[0] for part in parts) != pattern:
        return False
    depth, follows_word = 0, False
    for part in parts:
        depth += (part["open"] is not None) - (part["close"] is not None)
        if part["bar"]:
            follows_word = follows_word and depth > 0
        elif part["atom"]:
            atom = f"{part['atom']}|(?i:{part['atom']})"
            is_word, is_space = (_rest(atom, side) != [(side, (0, len(side)))] for side in (_WORD, _SPACE))
            if is_space and (follows_word or depth or (is_word and part["times"] not in ("", "?"))):
                return False
            follows_word = follows_word or is_word
    return True


def _rest(pattern: str, text: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the parts of a text outside the matches of a pattern, with their offsets."""
    return list(_remover(pattern).pre_tokenize_str(text))


@cache
def _remover(pattern: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return Split(Regex(pattern), "removed")


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
