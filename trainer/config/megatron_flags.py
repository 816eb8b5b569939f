"""Megatron-LM flags and their equivalent keys, from the table beside this module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from reprise.errors import ConfigError
from trainer.config.schema import key_types
from trainer.config.suggest import closest

DIFFERENCE = "difference"
OPTIONS = ("--help", "--cfg", "--config-dir")  # of the command


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
        if not name.startswith("--") or name in OPTIONS:
            continue
        if not equals and number + 1 < len(words) and not words[number + 1].startswith("--"):
            value = words[number + 1]
        if answer := _answer(name[2:].replace("-", "_"), value):
            answers[word] = f"{name}: {answer}"
    if answers:
        raise ConfigError(
            "The command line has flags, but settings have the form SECTION.KEY=VALUE",
            found=", ".join(answers),
            fix="\n  " + "\n  ".join(answers.values()) + "\n`reprise options KEY` describes a key.",
        )


def _answer(name: str, value: str) -> str | None:
    """Return the overrides for a flag's name, in the spelling of keys: by the table, else by a similar key, if any."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(key_types())}
    flag_keys = flags().get(f"--{name.replace('_', '-')}")
    if flag_keys == []:
        return "has no counterpart; omit it"
    if flag_keys is None:
        similar = closest(name, by_name)
        return f"perhaps {by_name[similar]}={value or 'VALUE'}" if similar else None
    has_its_name = flag_keys[0].rpartition(".")[2] == name
    return f"{flag_keys[0]}={value}" if has_its_name and value else f"set {' and '.join(flag_keys)}"
