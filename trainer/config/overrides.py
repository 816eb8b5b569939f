"""Text in overrides: quoted for Hydra's grammar, and escaped for OmegaConf's interpolations."""

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

# A member of a list or a mapping, quoted or not.
_MEMBER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s,:\[\]{}'"](?:[^,:\[\]{}'"]*[^\s,:\[\]{}'"])?""")


def readable(overrides: Sequence[str]) -> list[str]:
    """Quote text in overrides that Hydra would refuse or read differently. Other overrides stay.

    Raises:
        ConfigError: An override is not valid UTF-8.
    """
    return [_readable(word) for word in overrides]


def hint_of(key: str) -> Any:
    """Return a configuration key's type. None for an unknown key."""
    hint: Any = Config
    for name in key.split("."):
        section = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        hint = None if section is None else get_type_hints(section).get(name)
    return hint


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


def is_other_text(value: object, text: str) -> bool:
    """Return whether a value is a number or boolean whose normal form differs from `text`."""
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
        return _readable(f"{key}=[{value}]")  # a list with a single member
    is_text = Any in kinds or (str in kinds and int not in kinds)
    if not equals or (is_read and not is_text and not any(map(is_dataclass, kinds))):
        return word
    texts = [] if is_read else [quote(value)]
    if value.startswith(("[", "{")):
        is_text &= "{" not in value  # a mapping's members may be numbers
        texts.insert(0, _MEMBER.sub(lambda member: _typed(member[0], is_text=is_text), value))
    elif is_read:
        texts = [quote(value) if hint is str and value.lower() == "null" else _typed(value, is_text=is_text)]
    return next((quoted for text in texts if _parse(quoted := f"{key}={text}") is not None), word)


def _typed(text: str, *, is_text: bool) -> str:
    """Return a value, quoted if Hydra refuses it or reads a number or boolean instead of the text."""
    override = _parse(f"key={text}")
    if override is None:
        return quote(text)
    is_other = is_other_text(override.value(), "" if is_text else text.strip())
    return quote(text.strip()) if is_other and "(" not in text else text  # Hydra's cast float(1) converts on its own


def quote(text: str) -> str:
    """Quote a text in Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def _parse(word: str) -> Override | None:
    """Parse an override like Hydra. Return None if its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
