"""Describe the configuration keys: `reprise options [KEY]`.

The exit status is 0, or 2 if no key starts with the given name.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator

from trainer.commands.frame import FINE, IMPOSSIBLE, framed
from trainer.config.options import Row, groups, sections
from trainer.config.schema import key_types
from trainer.config.suggest import closest


def describe(options: argparse.Namespace) -> int:
    """Print the keys matching the command line and return the exit status."""
    key = options.key.partition("=")[0]
    if lines := list(_lines(key)):
        print("\n".join(lines))
        return FINE
    closest_name = closest(key, [*key_types(), *(group for group, _ in groups())])
    hint = f"did you mean {closest_name}?" if closest_name else "`reprise options` lists all"
    print(f"reprise options: no key starts with {key!r}; {hint}", file=sys.stderr)
    return IMPOSSIBLE


def _lines(key: str) -> Iterator[str]:
    for group, choices in groups():
        if key in ("", group):
            yield f"{group}= one of {', '.join(choices).replace('**', '').replace('`', '')}"
    for section in sections():
        rows = [row for row in section.rows if row.key == key or row.key.startswith(f"{key}.")]
        for row in rows or [row for row in section.rows if row.key.startswith(key)]:
            yield from _description(row)


def _description(row: Row) -> Iterator[str]:
    yield f"{row.key} ({row.kind}; default {row.default})".replace("`", "")
    yield from textwrap.wrap(row.meaning.replace("`", ""), 100, initial_indent="    ", subsequent_indent="    ")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a key, a section, a group or a key prefix (all)"
    )


main = framed(describe, _add_arguments)
