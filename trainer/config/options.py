"""Describes the configuration keys from the schema. The text comes from its dataclasses' docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from reprise.storage import is_dir, matching
from trainer.config.schema import Config

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
    hints = get_type_hints(Config)
    for field in fields(Config):
        if is_dataclass(hint := hints[field.name]):
            yield Section(field.name, _summary(hint), tuple(_rows(hint, field.name)))


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
    hints, explained = get_type_hints(section), _meanings(section)
    for field in fields(section):
        hint = hints[field.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (str, list, NoneType) if hint is Any else (hint,)
        if field.default is None:  # the default shows it
            kinds = tuple(kind for kind in kinds if kind is not NoneType)
        yield Row(f"{prefix}.{field.name}", " or ".join(map(_kind, kinds)), _default(field), explained[field.name])
        for kind in filter(is_dataclass, kinds):
            yield from _rows(kind, f"{prefix}.{field.name}")


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
