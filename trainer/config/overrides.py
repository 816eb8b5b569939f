"""Text in overrides: quoted for Hydra's grammar, and escaped for OmegaConf's interpolations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from trainer.config.schema import key_types

_QUOTED = re.compile(r"""(['"]).*\1""", re.DOTALL)
# A member of a list or a mapping, quoted or not.
_MEMBER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s,:\[\]{}'"](?:[^,:\[\]{}'"]*[^\s,:\[\]{}'"])?""")


def readable(overrides: Sequence[str]) -> list[str]:
    """Return overrides as Hydra must read them: a text key's value is literal, unless it is quoted or null.

    Members of lists and mappings are quoted if Hydra would refuse or change them. A list may be given as a single
    member.
    """
    return [_readable(word) for word in overrides]


def text_value(text: str) -> str:
    """Return the override value for a text, quoted if Hydra would read another value.

    OmegaConf cannot express the text ``???``, its mark for a missing value.
    """
    literal = str(escape(text))
    override = _parse(f"key={literal}")
    is_plain = override is not None and override.value() == literal
    return literal if is_plain else quote(literal)


def escape(value: object) -> object:
    """Escape `value` for OmegaConf, so its texts contain no interpolation."""
    if isinstance(value, dict):
        return {key: escape(member) for key, member in value.items()}
    if isinstance(value, list):
        return [escape(member) for member in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _readable(word: str) -> str:
    key, equals, value = word.lstrip("+").partition("=")  # every key is there, so none is appended
    if not equals:
        return word
    kinds = key_types().get(key, ())
    is_list = any(get_origin(kind) is list for kind in kinds)
    if is_list and re.match(r"[^\[$'\"]", value) and value != "null":
        value = f"[{value}]"  # a list with a single member
    has_members = value.startswith(("[", "{"))
    is_text = str in kinds and int not in kinds and not is_list
    if is_text or (Any in kinds and not has_members):
        is_null = value.lower() == "null" and kinds != (str,)
        return f"{key}={value if is_null or _QUOTED.fullmatch(value) else quote(value)}"
    value = _MEMBER.sub(_readable_member, value) if has_members else value
    return f"{key}={value if _parse(f'{key}={value}') else quote(value)}"


def _readable_member(member: re.Match[str]) -> str:
    """Return a member, quoted if Hydra refuses it or reads a number with other digits, such as a long weight."""
    override = _parse(f"key={member[0]}")
    value = None if override is None else override.value()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return quote(member[0]) if override is None or (is_number and str(value) != member[0]) else member[0]


def quote(text: str) -> str:
    """Quote a text in Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def _parse(word: str) -> Override | None:
    """Parse an override like Hydra. Return None if its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
