"""Describes the configuration keys from the schema. The text comes from its dataclasses' docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from reprise.storage import is_dir, matching
from trainer.config.schema import key_types

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "text", list: "list", NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration key with its description, in Markdown."""

    key: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """A configuration section with its keys. A nested section's keys follow its own key."""

    name: str
    summary: str
    rows: tuple[Row, ...]


def sections() -> Iterator[Section]:
    """Yield the schema's sections.

    Raises:
        KeyError: A key has no entry in its section's docstring.
    """
    for name, (kind, *_) in key_types().items():
        if "." not in name and is_dataclass(kind):
            yield Section(name, _summary(kind), tuple(_rows(kind, name)))


def choices_in(folder: Path) -> dict[str, list[str]]:
    """Return each group's choices in a configuration folder."""
    groups_there = sorted(path for path in folder.iterdir() if is_dir(path))
    return {group.name: sorted(path.stem for path in matching(group, "*.yaml")) for group in groups_there}


def groups() -> Iterator[tuple[str, list[str]]]:
    """Yield the configuration groups with their choices, the default in bold."""
    top = (CONFIGS / "train.yaml").read_text(encoding="utf-8")
    for group, names in choices_in(CONFIGS).items():
        default = re.search(rf"^  - {group}: (\w+)", top, flags=re.M)
        yield group, [f"**`{name}`**" if default and name == default[1] else f"`{name}`" for name in names]


def _rows(section: Any, prefix: str) -> Iterator[Row]:
    explained = _meanings(section)
    for field in fields(section):
        key = f"{prefix}.{field.name}"
        kinds = (str, list, NoneType) if Any in key_types()[key] else key_types()[key]
        if field.default is None:  # the default shows it
            kinds = tuple(kind for kind in kinds if kind is not NoneType)
        yield Row(key, " or ".join(map(_kind, kinds)), _default(field), explained[field.name])
        for kind in filter(is_dataclass, kinds):
            yield from _rows(kind, key)


def _kind(kind: type) -> str:
    if get_origin(kind) is list:
        (member,) = get_args(kind)
        return f"list of {_kind(member)}s"
    if issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return "the keys below" if is_dataclass(kind) else _NAMES[kind]


def _default(field: Field[object]) -> str:
    if field.default_factory is list:
        return "`[]`"
    if field.default is MISSING:
        return "by `model=`" if field.default_factory is MISSING else "below"
    default = field.default.value if isinstance(field.default, Enum) else field.default
    return f"`{default}`" if isinstance(default, str) and default else f"`{json.dumps(default)}`"


def _summary(section: Any) -> str:
    return inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def _meanings(section: type) -> dict[str, str]:
    """Return the `Args:` entries from a class's docstring and its bases', each as a single line."""
    entries = list[tuple[str, str]]()
    for base in section.__mro__:
        _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")
        entries += re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, flags=re.M)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}
