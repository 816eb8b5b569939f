"""Checks single values of a configuration: finite numbers, usable paths, values of the environment. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

from reprise.errors import ConfigError
from reprise.files import is_store_url, is_url, location

# Keys that name a file or a folder, or become a part of a path.
_PATHS = (
    "run.name",
    "run.dir",
    "checkpoint.save",
    "checkpoint.local.dir",
    "checkpoint.mirror",
    "checkpoint.load",
    "checkpoint.base",
    "data.path",
    "data.tokenizer",
    "data.train",
    "data.valid",
    "data.cache",
)
# Those of them that may be, or must be, the URL of a store.
_MAY_BE_STORED = ("checkpoint.load", "checkpoint.mirror")
_MUST_BE_STORED = ("checkpoint.mirror",)
_INT64 = 1 << 63
# Clocks, timers and torch's stores count in 64 bits of small units: 30 years are enough.
MOST_SECONDS = 1e9


def number_problems(config: object) -> list[str]:
    """Return every number of a configuration that is nonfinite, or no signed integer of 64 bits."""
    problems = []
    for key, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{key}={value}: must be a finite number")
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            problems.append(f"{key}={value}: must fit into a signed integer of 64 bits")
    return problems


def type_problems(config: object, prefix: str = "") -> list[str]:
    """Return every section and list of a configuration with a value of another type, such as an interpolation."""
    problems = []
    hints = get_type_hints(type(config))
    for field in fields(config):  # type: ignore[arg-type]
        key, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        sections = tuple(kind for kind in get_args(hint) or (hint,) if is_dataclass(kind))
        if is_dataclass(value):
            problems += type_problems(value, f"{key}.")
        elif sections and value is not None:
            problems.append(f"{key}={value}: must be a section of keys")
        elif get_origin(hint) is list:
            (kind,) = get_args(hint)
            if not isinstance(value, list) or not all(type(member) is kind for member in value):
                problems.append(f"{key}={value}: must be a list of {kind.__name__}")
    return problems


def path_problems(config: object) -> list[str]:
    """Return every path of a configuration that is empty, a URL, or invalid UTF-8."""
    problems = []
    for key, value in _leaves(config):
        if not isinstance(value, str):
            continue
        if not _is_utf8(value):
            problems.append(f"{key}={value.encode('utf-8', 'backslashreplace').decode()}: is not valid UTF-8")
        elif key in _PATHS and not value.strip():
            problems.append(f"{key}={value}: is empty; omit it to use the default")
        elif key in _MUST_BE_STORED and not is_store_url(value):
            problems.append(f"{key}={value}: must be the URL of a store, such as s3://bucket/run")
        elif key in _MAY_BE_STORED and is_store_url(value):
            problems += _store_problems(key, value)
        elif key in _PATHS and is_url(value):
            problems.append(f"{key}={value}: is a URL; only paths of mounted file systems can be read and written")
    return problems


def _store_problems(key: str, value: str) -> list[str]:
    try:
        location(value)
    except ConfigError as error:
        return [f"{key}: {error}"]  # which repeats the URL without what may be a secret
    return []


def from_environment(table: object) -> set[str]:
    """Return the dotted keys whose values come from environment variables, by way of other keys too.

    Args:
        table: the configuration as nested dictionaries, with its interpolations as they are written.
    """
    texts = dict(_interpolated(table))
    keys = {key for key, text in texts.items() if "oc.env" in text}
    while more := {k for k, text in texts.items() if k not in keys and any(f"{{{key}}}" in text for key in keys)}:
        keys |= more
    return keys


def _interpolated(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of every interpolated value."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from _interpolated(value, f"{prefix}{key}.")
        if isinstance(value, str) and "${" in value:
            yield f"{prefix}{key}", value


def _leaves(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every member of nested dataclasses."""
    if not is_dataclass(section):
        return
    for field in fields(section):
        value = getattr(section, field.name)
        yield prefix + field.name, value
        yield from _leaves(value, f"{prefix}{field.name}.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
