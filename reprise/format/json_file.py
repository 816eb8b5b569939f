"""Reads and writes standard JSON files: no NaN, no duplicate keys, limited size and depth."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from reprise.errors import CheckpointError
from reprise.regular_file import open_regular
from reprise.storage.patience import failed_read

Json = dict[str, Any]
Document = Json | bytes  # a file of a checkpoint that holds no tensors: JSON, or bytes as they are

# A manifest of a 405B model is about 12 MB; safetensors bounds its headers at 100 MB.
MAX_BYTES = 256 << 20
# What nests deeper than any document of ours; below it nothing that recurses, such as `repr`, comes to its end.
MAX_DEPTH = 64


def to_bytes(value: Json) -> bytes:
    """Return `value` as indented standard JSON that ends with a newline.

    Raises:
        CheckpointError: for NaN, infinity, a value that JSON does not have, or anything that `parse` rejects.
    """
    try:
        data = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        _check_depth(value)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} B of JSON, more than {MAX_BYTES} B")
        return data
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "A value cannot be stored as JSON",
            where=_unstorable(value) or None,
            expected="finite numbers, strings, booleans, null, lists and dictionaries of them",
            found=error,
        ) from error


def _unstorable(value: object, where: str = "", depth: int = 0) -> str:
    """Return the place of the first member of `value` that JSON lacks, such as `state["a"][3]`; empty without one."""
    if depth > MAX_DEPTH:
        return where
    if not isinstance(value, dict | list | tuple):
        return "" if _is_storable(value) else where
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        name = str(key) if depth == 0 else f"[{_quoted(key)}]"
        place = _unstorable(member, where + name, depth + 1) if _is_storable({key: None}) else where + name
        if place:
            return place
    return ""


def _is_storable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _quoted(key: object) -> str:
    text = json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key)
    return text.encode(errors="backslashreplace").decode()


def content(document: Document) -> bytes:
    """Return the bytes of a file that holds no tensors.

    Raises:
        CheckpointError: as `to_bytes`.
    """
    return document if isinstance(document, bytes) else to_bytes(document)


def parse(data: bytes, *, where: object) -> Json:
    """Parse one JSON object.

    Raises:
        CheckpointError: if `data` is not a standard JSON object: invalid UTF-8, an unpaired surrogate, NaN, a number
            out of float range, a duplicate key, too large, too deep.
    """
    if len(data) > MAX_BYTES:
        raise CheckpointError("A JSON file is too large", where=where, expected=f"<= {MAX_BYTES} B", found=len(data))
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
        _check_depth(value)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair: no path and no message can hold it
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "A JSON file cannot be read", where=where, expected="one standard JSON object", found=error
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError("A JSON file holds no object", where=where, found=type(value).__name__)
    return value


def read(path: Path) -> Json:
    """Read and parse the JSON object in `path`.

    Raises:
        CheckpointError: if the file is missing, a pipe or a device, or not a standard JSON object.
        UnreadableError: if it cannot be read at the moment.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return parse(file.read(MAX_BYTES + 1), where=path)
    except OSError as error:
        raise failed_read("A JSON file cannot be read", error, where=path) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not standard JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is out of the range of a float")
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (
                parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list | tuple) else ()
            )
            if isinstance(child, dict | list | tuple)
        ]
        if not level:
            return
    raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table
