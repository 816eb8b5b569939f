"""Standard JSON files, without NaN or duplicate keys, limited in size and depth, and checks for their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from reprise.errors import CheckpointError, MismatchError
from reprise.storage.paths import MAX_BYTES as MAX_BYTES
from reprise.storage.paths import read_regular
from reprise.storage.patience import failed_read

T = TypeVar("T")
Json = dict[str, Any]
Document = Json | bytes  # a checkpoint file without tensors: JSON, or raw bytes

# Deeper than any of our documents nests, and shallow enough for recursive functions such as `repr`.
MAX_DEPTH = 64
MAX_INTEGER = 2**63 - 1  # the largest integer in numpy and torch
_MAX_TEXT, _MAX_ITEMS = 200, 10
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_STRICT = json.JSONEncoder(allow_nan=False)
_SEAL = '"xxh3_64":"%s"}\n'  # the last member in `manifest.json` and `host.json`


def to_bytes(value: Json) -> bytes:
    """Return `value` as indented standard JSON with a trailing newline.

    Raises:
        CheckpointError: The value contains NaN, infinity or a type unknown to JSON, or is too deep or too large.
    """
    try:
        data = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        require_depth(value)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} B of JSON, more than {MAX_BYTES} B")
        return data
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "A value cannot be stored as JSON",
            expected="finite numbers, strings, booleans, null, lists and dictionaries of them",
            found=error,
        ) from error


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is not a finite float")
    return value


def parse(data: bytes, *, where: object, constant: Callable[[str], object] = _parse_finite) -> Json:
    """Parse a JSON object.

    Args:
        constant: Converts `NaN`, `Infinity` and `-Infinity`. By default they are refused.

    Raises:
        CheckpointError: `data` is not a standard JSON object (invalid UTF-8, an unpaired surrogate, NaN, a number out
            of float range, a duplicate key), or is too deep.
    """
    try:
        value = json.loads(
            data.decode(), parse_constant=constant, parse_float=_parse_finite, object_pairs_hook=_unique_keys
        )
        require_depth(value)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # fails for an unpaired surrogate, which no message can hold
        if not isinstance(value, dict):
            raise ValueError(shown(value))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "A JSON file cannot be read", where=where, expected="one standard JSON object", found=error
        ) from error
    return value


def read(path: Path, *, constant: Callable[[str], object] = _parse_finite) -> Json:
    """Read and parse the JSON object in `path`; see `parse`.

    Raises:
        CheckpointError: The file is missing, too large, a pipe or a device, or not a standard JSON object.
        UnreadableError: The file cannot be read at the moment.
    """
    try:
        return parse(read_regular(path), where=path, constant=constant)
    except OSError as error:
        raise failed_read("A JSON file cannot be read", error, where=path) from error


def require_depth(value: object, levels: int = MAX_DEPTH) -> None:
    """Check whether a value nests at most `levels` deep.

    Raises:
        ValueError: It nests deeper.
    """
    if isinstance(value, dict | list | tuple):
        if not levels:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
        for member in value.values() if isinstance(value, dict) else value:
            if type(member) is not int:  # a manifest has millions of integers
                require_depth(member, levels - 1)


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def shown(value: object) -> str:
    """Describe a file's value for a message: a short text, formatted in bounded time.

    For values other than numbers, text and lists, only the type is shown.
    """
    if value is None or isinstance(value, int | float | complex):
        return repr(value)
    if isinstance(value, str | bytes):
        return repr(value[:_MAX_TEXT]) + ("..." if len(value) > _MAX_TEXT else "")
    if isinstance(value, list | tuple):
        parts = [shown(part) if not isinstance(part, list | tuple) else "..." for part in value[:_MAX_ITEMS]]
        return f"[{', '.join(parts)}{', ...' if len(value) > _MAX_ITEMS else ''}]"
    return f"an object of {type(value).__name__}"


def integer(value: object, *, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer from 0 to `most`.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is not an integer from 0 to {most}")
    return value


def finite_number(value: object, *, least: float = -math.inf) -> float:
    """Return `value` as a float if it is a finite number, at least `least`, with magnitude below 2**63.

    Raises:
        ValueError: It is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not max(least, -MAX_INTEGER) <= value <= MAX_INTEGER:  # type: ignore[operator]
        bound = f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{shown(value)} is not a finite number{bound}")
    return float(value)  # type: ignore[arg-type]


def dumps(value: object) -> str:
    """Return standard JSON on a single line, with null in place of NaN and infinity."""
    try:
        return _STRICT.encode(value)
    except ValueError:
        return _STRICT.encode(json.loads(json.dumps(value), parse_constant=lambda _: None))


def sealed(body: Json) -> bytes:
    """Return JSON with its own digest: the last member digests all bytes before its comma.

    The text is encoded in parts, since a manifest has tens of MB, and the encoder blocks all other threads.
    """
    data = b"".join(part.encode() for part in _parts_of(body))
    return data + f",{_SEAL % _digest_of(data)}".encode()


def _parts_of(body: Json) -> Iterator[str]:
    """Yield compact JSON in parts, without its last brace, splitting nested objects into members."""
    comma = "{"
    for name, value in body.items():
        yield f"{comma}{_COMPACT.encode(name)}:"
        comma = ","
        if not isinstance(value, dict) or not value:
            yield _COMPACT.encode(value)
            continue
        inner_comma = "{"
        for key, member in value.items():
            yield f"{inner_comma}{_COMPACT.encode(key)}:{_COMPACT.encode(member)}"
            inner_comma = ","
        yield "}"


def _digest_of(data: bytes) -> str:
    import xxhash  # imported late: most commands read only unsealed JSON, and start sooner without it

    return xxhash.xxh3_64(data).hexdigest()  # unlike encoding, blocks no other thread


def unsealed(
    data: bytes, build: Callable[[Json], T], *, kind: str, form: str, where: object, fix: str | None = None
) -> T:
    """Check the digest and the format version, and return the result of `build` for the members.

    Args:
        build: Builds the result, and raises LookupError, TypeError, ValueError or AttributeError for bad members.
        kind: The file kind, for messages.
        form: The expected value for `format`.
        fix: The remedy for a damaged file.

    Raises:
        MismatchError: The file has another format version.
        CheckpointError: The file is damaged, or `build` finds a member missing or invalid.
    """
    body, _, seal = data.rpartition(b",")
    try:
        if seal != (_SEAL % _digest_of(body)).encode():
            raise ValueError("another digest")
        table = parse(data, where=where)
        if table.get("format") != form:
            raise MismatchError(
                f"A {kind} has another format version",
                where=where,
                expected=form,
                found=table.get("format"),
                fix="Load it with the version of this program that wrote it, or a newer one.",
            )
        return build(table)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"A {kind} is damaged", where=where, found=repr(error), fix=fix) from error
