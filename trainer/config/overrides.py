"""Text as values of overrides: quoted for Hydra's grammar, and for OmegaConf's interpolations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from reprise.errors import ConfigError

# A member of a list or a mapping that is no quoted text.
_MEMBER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s,:\[\]{}'"](?:[^,:\[\]{}'"]*[^\s,:\[\]{}'"])?""")


def readable(overrides: Sequence[str]) -> list[str]:
    """Return overrides with quotes around text outside Hydra's grammar; all others stay as they are.

    Raises:
        ConfigError: for an override of invalid UTF-8.
    """
    return [_readable(word) for word in overrides]


def text_value(text: str) -> str:
    """Return the value of an override for this text: quoted where Hydra would read another value.

    OmegaConf has no form for the text ``???``, its mark of a missing value.
    """
    literal = str(escape(text))
    override = _parse(f"key={literal}")
    is_plain = override is not None and override.value() == literal and type(override._value) is str
    return literal if is_plain else _quote(literal)


def escape(value: object) -> object:
    """Return `value` escaped for OmegaConf: no text in it is an interpolation."""
    if isinstance(value, dict):
        return {key: escape(member) for key, member in value.items()}
    if isinstance(value, list):
        return [escape(member) for member in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _readable(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError as error:
        escaped = word.encode("utf-8", "backslashreplace").decode()
        raise ConfigError("An override is not valid UTF-8", found=escaped, fix="Rename the file or folder.") from error
    key, equals, value = word.partition("=")
    if not equals or _parse(word) is not None:
        return word
    texts = [_quote(value)]
    if value.startswith(("[", "{")):
        texts.insert(0, _MEMBER.sub(lambda member: _quoted_member(member[0]), value))
    return next((quoted for text in texts if _parse(quoted := f"{key}={text}") is not None), word)


def _quoted_member(text: str) -> str:
    return text if _parse(f"key={text}") is not None else _quote(text)


def _quote(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _parse(word: str) -> Override | None:
    """Return an override as Hydra reads it; None if its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
