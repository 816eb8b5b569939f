"""Checks single values of a configuration: finite numbers, usable paths, values of the environment. Pure."""

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
# What OmegaConf may read a value from: ${KEY}, ${..KEY}, ${KEY[0]}, ${oc.select:KEY,DEFAULT}.
_REFERENCE = re.compile(r"""[{:]\s*['"]?(\.*)([\w.\[\]]+)""")
_IN_A_LIST = re.compile(r"\.\d+(\..*)?$")


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
            problems.append(f"{key}={value}: {url_problem(value)}")
    return problems


def _store_problems(key: str, value: str) -> list[str]:
    try:
        location(value)
    except ConfigError as error:
        return [f"{key}: {error}"]  # which repeats the URL without what may be a secret
    return []


def from_environment(table: object) -> set[str]:
    """Return the dotted keys whose values come from environment variables, by way of other keys too.

    A list counts as a value: the key of the list is returned if a member comes from there.

    Args:
        table: the configuration as nested dictionaries, with its interpolations as they are written.
    """
    texts = dict(_interpolated(table))
    sources = {place: _references(place, text) for place, text in texts.items()}
    places = {place for place, text in texts.items() if "oc.env" in text}
    while more := {place for place in sources.keys() - places if any(map(partial(_meet, places), sources[place]))}:
        places |= more
    return {_IN_A_LIST.sub("", place) for place in places}


def _interpolated(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted place and the text of every interpolated value, also in lists."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in members:
        yield from _interpolated(value, f"{prefix}{key}.")
        if isinstance(value, str) and "${" in value:
            yield f"{prefix}{key}", value


def _references(place: str, text: str) -> list[str]:
    """Return the dotted places that an interpolated value names, absolutely or by leading dots."""
    references = []
    for dots, path in _REFERENCE.findall(text):
        parents = place.split(".")[: -len(dots)] if dots else []
        references.append(".".join([*parents, *re.findall(r"[^.\[\]]+", path)]))
    return references


def _meet(places: Collection[str], reference: str) -> bool:
    """Return whether a reference is among places, or is a section or a member of such a place."""
    return any(f"{place}.".startswith(f"{reference}.") or reference.startswith(f"{place}.") for place in places)


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
