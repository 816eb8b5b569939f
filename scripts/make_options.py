"""Write docs/options.md from the schema of the configuration: `python -m scripts.make_options`.

The docstrings of the schema's dataclasses are the text, so a key without an explanation is an error here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from trainer.__main__ import CONFIGS
from trainer.config.schema import Config

OUTPUT = CONFIGS.parent / "docs" / "options.md"

_HEAD = """\
# Options

Every key of the configuration: its type, its default and its meaning. This page is generated from the schema by
`python -m scripts.make_options`, and a test compares the two.

On the command line a key is set as `SECTION.KEY=VALUE`, as in `reprise train train.seed=5 checkpoint.save=null`. A
group sets several keys at once by the name of one of its files, as in `parallel=zero3`. Keys on the command line win
over an `experiment=`, and an experiment wins over the defaults of the other groups. `reprise train --cfg job` prints
the configuration that a command line composes.

## Groups

| group | choices, the default in bold |
|---|---|
"""
_TABLE = "| key | type | default | meaning |\n|---|---|---|---|\n"
_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Row:
    """One key of the configuration as the page shows it."""

    key: str
    kind: str
    default: str
    meaning: str


def main() -> None:
    """Write the page and name its file."""
    OUTPUT.write_text(page(), encoding="utf-8")
    print(OUTPUT)


def page() -> str:
    """Return the page that the schema and the files of configs/ describe."""
    parts = [_HEAD + "".join(f"| `{group}=` | {', '.join(names)} |\n" for group, names in _groups())]
    hints = get_type_hints(Config)
    sections = {field.name: hints[field.name] for field in fields(Config) if is_dataclass(hints[field.name])}
    for name, section in sections.items():
        rows = "".join(_line(row) for row in _rows(section, name))
        parts.append(f"## {name}\n\n{_summary(section)}\n\n{_TABLE}{rows}")
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of the configuration and their choices."""
    top = (CONFIGS / "train.yaml").read_text(encoding="utf-8")
    for folder in sorted(path for path in CONFIGS.iterdir() if path.is_dir()):
        default = re.search(rf"^  - {folder.name}: (\w+)", top, flags=re.M)
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        yield folder.name, [f"**`{name}`**" if default and name == default[1] else f"`{name}`" for name in names]


def _rows(section: Any, prefix: str) -> Iterator[Row]:
    """Yield the keys of a section, those of nested sections behind them.

    Raises:
        KeyError: for a key that the docstring of its section does not explain.
    """
    hints, explained = get_type_hints(section), _meanings(section)
    for field in fields(section):
        hint = hints[field.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (str, list, NoneType) if hint is Any else (hint,)
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
        return "by `model=`"
    match field.default:
        case None:
            return "`null`"
        case bool(value):
            return f"`{str(value).lower()}`"
        case Enum(value=value):
            return f"`{value}`"
        case "":
            return '`""`'
        case value:
            return f"`{value}`"


def _summary(section: Any) -> str:
    return inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def _meanings(section: type) -> dict[str, str]:
    """Return the entries of the docstring's list `Args:`, each in one line."""
    _, _, listed = inspect.cleandoc(section.__doc__ or "").partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, flags=re.M)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


def _line(row: Row) -> str:
    meaning = row.meaning[0].upper() + row.meaning[1:] if row.meaning[0].isalpha() else row.meaning
    cells = (f"`{row.key}`", row.kind, row.default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    main()
