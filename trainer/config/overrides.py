"""Text as values of overrides: quoted for Hydra's grammar, and for OmegaConf's interpolations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from reprise.errors import ConfigError
from trainer.config.schema import Config

# A member of a list or a mapping that is no quoted text.
_MEMBER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s,:\[\]{}'"](?:[^,:\[\]{}'"]*[^\s,:\[\]{}'"])?""")


def readable(overrides: Sequence[str]) -> list[str]:
    """Return overrides with quotes around text that Hydra would refuse or read as another text; others stay.

    Raises:
        ConfigError: for an override of invalid UTF-8.
    """
    return [_readable(word) for word in overrides]


def hint_of(key: str) -> Any:
    """Return the type of a key of the configuration; None for an unknown key."""
    hint: Any = Config
    for name in key.split("."):
        section = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        hint = None if section is None else get_type_hints(section).get(name)
    return hint


def text_value(text: str) -> str:
    """Return the value of an override for this text: quoted where Hydra would read another value.

    OmegaConf has no form for the text ``???``, its mark of a missing value.
    """
    literal = str(escape(text))
    override = _parse(f"key={literal}")
    is_plain = override is not None and override.value() == literal
    return literal if is_plain else quote(literal)


def escape(value: object) -> object:
    """Return `value` escaped for OmegaConf: no text in it is an interpolation."""
    if isinstance(value, dict):
        return {key: escape(member) for key, member in value.items()}
    if isinstance(value, list):
        return [escape(member) for member in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def is_other_text(value: object, text: str) -> bool:
    """Return whether a value is a number or a truth value that is not written as `text`."""
    return isinstance(value, int | float) and str(value) != text


def _readable(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError as error:
        escaped = word.encode("utf-8", "backslashreplace").decode()
        raise ConfigError("An override is not valid UTF-8", found=escaped, fix="Rename the file or folder.") from error
    key, equals, value = word.partition("=")
    hint, is_read = hint_of(key.lstrip("+")), _parse(word) is not None
    kinds = (hint, *get_args(hint))
    if any(get_origin(kind) is list for kind in kinds) and re.match(r"[^\[$'\"]", value) and value != "null":
        return _readable(f"{key}=[{value}]")  # a list of one
    is_text = Any in kinds or (str in kinds and int not in kinds)
    if not equals or (is_read and not is_text and not any(map(is_dataclass, kinds))):
        return word
    texts = [] if is_read else [quote(value)]
    if value.startswith(("[", "{")):
        is_text &= "{" not in value  # whose members may be numbers
        texts.insert(0, _MEMBER.sub(lambda member: _typed(member[0], is_text=is_text), value))
    elif is_read:
        texts = [quote(value) if hint is str and value.lower() == "null" else _typed(value, is_text=is_text)]
    return next((quoted for text in texts if _parse(quoted := f"{key}={text}") is not None), word)


def _typed(text: str, *, is_text: bool) -> str:
    """Return a value, quoted where Hydra refuses it, or reads a number or truth value in place of the text."""
    override = _parse(f"key={text}")
    if override is None:
        return quote(text)
    is_other = is_other_text(override.value(), "" if is_text else text.strip())
    return quote(text.strip()) if is_other and "(" not in text else text  # float(1) converts by itself


def quote(text: str) -> str:
    """Return the text as a quoted value of Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def _parse(word: str) -> Override | None:
    """Return an override as Hydra reads it; None if its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
