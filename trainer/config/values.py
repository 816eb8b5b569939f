"""Checks single configuration values: finite numbers, usable paths, environment variables. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from reprise.errors import ConfigError
from reprise.storage import is_url, url_problem
from reprise.stores import is_store_url, location

# Keys that name a file or folder, or become part of a path.
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
# Path keys that may be, or must be, a store URL.
_MAY_BE_STORED = ("checkpoint.load", "checkpoint.mirror")
_MUST_BE_STORED = ("checkpoint.mirror",)
_INT64 = 1 << 63
# Clocks, timers and torch's stores count small units in 64 bits: 30 years are enough.
MOST_SECONDS = 1e9
# References in OmegaConf interpolations: ${KEY}, ${..KEY}, ${KEY[0]}, ${oc.select:KEY,DEFAULT}.
_REFERENCE = re.compile(r"""[{:]\s*['"]?(\.*)([\w.\[\]]+)""")
_IN_A_LIST = re.compile(r"\.\d+(\..*)?$")


def number_problems(config: object) -> list[str]:
    """List nonfinite numbers, and integers beyond 64 signed bits."""
    problems = []
    for key, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{key}={value}: must be a finite number")
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            problems.append(f"{key}={value}: must fit into a signed 64-bit integer")
    return problems


def type_problems(config: object, prefix: str = "") -> list[str]:
    """List sections and lists with a value of another type, such as an interpolation."""
    problems = []
    hints = get_type_hints(type(config))
    for field in fields(config):  # type: ignore[arg-type]
        key, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        sections = tuple(kind for kind in kinds if is_dataclass(kind))
        lists = [kind for kind in kinds if get_origin(kind) is list]
        if is_dataclass(value):
            problems += type_problems(value, f"{key}.")
        elif sections and value is not None:
            problems.append(f"{key}={value}: must be a section of keys")
        elif lists and not (value is None and NoneType in kinds):
            (kind,) = get_args(lists[0])
            if not isinstance(value, list) or not all(type(member) is kind for member in value):
                problems.append(f"{key}={value}: must be a list of {kind.__name__}")
    return problems


def path_problems(config: object) -> list[str]:
    """List paths that are empty, a URL, or not valid UTF-8."""
    problems = []
    for key, value in _leaves(config):
        if not isinstance(value, str):
            continue
        if not _is_utf8(value):
            problems.append(f"{key}={value.encode('utf-8', 'backslashreplace').decode()}: is not valid UTF-8")
        elif key in _PATHS and not value.strip():
            problems.append(f"{key}={value}: is empty; omit it to use the default")
        elif key in _MUST_BE_STORED and not is_store_url(value):
            problems.append(f"{key}={value}: must be a store URL, such as s3://bucket/run")
        elif key in _MAY_BE_STORED and is_store_url(value):
            problems += _store_problems(key, value)
        elif key in _PATHS and is_url(value):
            problems.append(f"{key}={value}: {url_problem(value)}")
    return problems


def _store_problems(key: str, value: str) -> list[str]:
    try:
        location(value)
    except ConfigError as error:
        return [f"{key}: {error}"]  # the error shows the URL without possible secrets
    return []


def from_environment(table: object) -> set[str]:
    """Return the dotted keys whose values come from environment variables, also by way of other keys.

    A list counts as a value: if a member comes from there, the list's key is returned.

    Args:
        table: The configuration as nested dicts, with unresolved interpolations.
    """
    texts = dict(_interpolated(table))
    sources = {place: _references(place, text) for place, text in texts.items()}
    places = {place for place, text in texts.items() if "oc.env" in text}
    while more := {place for place in sources.keys() - places if any(map(partial(_overlaps, places), sources[place]))}:
        places |= more
    return {_IN_A_LIST.sub("", place) for place in places}


def _interpolated(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each interpolated value's dotted path and text, also in lists."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        yield from _interpolated(value, f"{prefix}{key}.")
        if isinstance(value, str) and "${" in value:
            yield f"{prefix}{key}", value


def _references(place: str, text: str) -> list[str]:
    """Return the dotted paths named by an interpolated value, absolute or relative by leading dots."""
    references = []
    for dots, path in _REFERENCE.findall(text):
        parents = place.split(".")[: -len(dots)] if dots else []
        references.append(".".join([*parents, *re.findall(r"[^.\[\]]+", path)]))
    return references


def _overlaps(places: Collection[str], reference: str) -> bool:
    """Return whether a reference is among the paths, contains such a path, or lies below it."""
    return any(f"{place}.".startswith(f"{reference}.") or reference.startswith(f"{place}.") for place in places)


def _leaves(section: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every member's dotted key and value in nested dataclasses."""
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
