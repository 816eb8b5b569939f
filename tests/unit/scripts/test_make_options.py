"""docs/generated/options.md says of every key what the schema says."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from scripts import make_options
from trainer.config.schema import Config


def keys(section: Any, prefix: str) -> set[str]:
    """Return the dotted keys of a section, those of nested sections included."""
    hints, found = get_type_hints(section), set[str]()
    for field in fields(section):
        name = f"{prefix}{field.name}"
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        nested = [key for kind in kinds if is_dataclass(kind) for key in keys(kind, f"{name}.")]
        found |= {name, *nested}
    return found


def test_the_page_is_that_of_the_schema() -> None:
    found = make_options.OUTPUT.read_text(encoding="utf-8")
    assert found == make_options.page(), "`python -m scripts.make_options` writes it anew"
    flags = make_options.FLAGS.read_text(encoding="utf-8")
    assert flags == make_options.with_flags(flags), "`python -m scripts.make_options` writes its tables anew"


def test_the_page_has_every_key_once_with_a_sentence() -> None:
    rows = [line.strip("| ").split(" | ") for line in make_options.page().splitlines() if line.startswith("| `")]
    explained = {row[0].strip("`"): row[-1] for row in rows if "=" not in row[0]}
    known = {key for key in keys(Config, "") if "." in key}
    assert explained.keys() == known
    assert len([row for row in rows if "=" not in row[0]]) == len(known)
    assert {key for key, meaning in explained.items() if not meaning.endswith(".")} == set()
