"""JSON with the digest of its own bytes: `manifest.json` and `host.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import xxhash

from reprise import json_file
from reprise.errors import CheckpointError, MismatchError
from reprise.json_file import Json

T = TypeVar("T")

_TAIL = ',"xxh3_64":"%s"}\n'


def to_bytes(body: Json) -> bytes:
    """Return the JSON form; its last member is the digest of all bytes before its comma."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))[:-1].encode()
    return text + (_TAIL % xxhash.xxh3_64_hexdigest(text)).encode()


def from_bytes(
    data: bytes, build: Callable[[Json], T], *, kind: str, form: str, where: object, fix: str | None = None
) -> T:
    """Check the digest and the format, and return what `build` makes of the members.

    Args:
        kind: of the file, for messages.
        form: the expected value of `format`.
        fix: the remedy if it is damaged.

    Raises:
        MismatchError: if it has another format version.
        CheckpointError: if it is damaged, or `build` finds a member missing or impossible.
    """
    tail = len(_TAIL % ("0" * 16))
    if data[-tail:] != (_TAIL % xxhash.xxh3_64_hexdigest(data[:-tail])).encode():
        raise CheckpointError(f"A {kind} is damaged", where=where, fix=fix)
    table = json_file.parse(data, where=where)
    if table.get("format") != form:
        raise MismatchError(
            f"A {kind} has another format version",
            where=where,
            expected=form,
            found=table.get("format"),
            fix="Load it with the version of this program that wrote it, or a newer one.",
        )
    try:
        return build(table)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"A {kind} is malformed", where=where, found=repr(error)) from error
