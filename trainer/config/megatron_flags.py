"""Megatron-LM flags and their equivalent keys, from the table beside this module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import yaml

from reprise.errors import ConfigError
from trainer.config.options import keys
from trainer.config.overrides import hint_of, text_value

DIFFERENCE = "difference"


@cache
def table() -> dict[str, list[dict[str, str]]]:
    """Return the table's rows by section: each flag with its keys, and the row's ``difference``."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    sections: dict[str, list[dict[str, str | None]]] = yaml.safe_load(text)
    return {
        title: [{name: text or "" for name, text in row.items()} for row in rows] for title, rows in sections.items()
    }


@cache
def flags() -> dict[str, list[str]]:
    """Return the keys for each flag. A flag without keys has no counterpart."""
    rows = (row for rows in table().values() for row in rows)
    return {flag: cell.split() for row in rows for flag, cell in row.items() if flag != DIFFERENCE}


def refuse_flags(words: Sequence[str]) -> None:
    """Refuse Megatron-LM flags, and keys spelled as flags, and name the matching keys.

    Raises:
        ConfigError: There are such flags. The message has an override for each.
    """
    answers: dict[str, str] = {}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not flag.startswith("--"):
            continue
        flag_keys = flags().get(flag) or _keys_named(flag)
        if flag not in flags() and not flag_keys:
            continue
        if not equals and number + 1 < len(words) and not words[number + 1].startswith("--"):
            value = words[number + 1]
        answers[word] = f"{name}: {_answer(flag, flag_keys, value)}"
    if answers:
        raise ConfigError(
            "The command line has flags, but settings have the form SECTION.KEY=VALUE",
            found=", ".join(answers),
            fix="\n  " + "\n  ".join(answers.values()) + "\n`reprise options KEY` describes a key.",
        )


def _keys_named(flag: str) -> list[str]:
    """Return the key spelled by a flag. Empty if several keys have this name."""
    flag_keys = [key for key in keys() if "." in key and key.rpartition(".")[2].replace("_", "-") == flag[2:]]
    return flag_keys if len(flag_keys) == 1 else []


def _answer(flag: str, keys: Sequence[str], value: str) -> str:
    if not keys:
        return "has no counterpart; omit it"
    has_its_name = keys[0].rpartition(".")[2] == flag.lstrip("-").replace("-", "_")
    if not has_its_name or not value:
        return f"set {' and '.join(keys)}"
    is_text = str in get_args(hint := hint_of(keys[0])) or hint is str
    return f"{keys[0]}={text_value(value) if is_text else value}"
