"""Reads JSON lines and numbers."""

from __future__ import annotations

import json
import math
import re

from reprise.errors import DataError
from trainer.compare.formats import Comma
from trainer.compare.points import Reading

_HEAD = 1 << 16  # characters in which a first line ends
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?:,\d{3})+\.\d*(?:e[+-]?\d+)?|(?:,\d{3}){2,})", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:\.\d{3})+),\d*(?:e[+-]?\d+)?", re.IGNORECASE)


def parse_records(text: str, *, source: str) -> tuple[list[tuple[str, dict[str, object]]], list[str]]:
    """Parse the JSON lines of a metrics.jsonl; return each object with its location, and notes.

    Raises:
        DataError: a line is not a JSON object.
    """
    records: list[tuple[str, dict[str, object]]] = []
    notes: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        where = f"{source}, line {number}"
        record = read_record(line, where, notes if number == len(lines) else None)
        if record is not None:
            records.append((where, record))
    return records, notes


def first_object(text: str) -> dict[str, object] | None:
    """Return the JSON object in the first line of a text, None if there is none."""
    try:
        record = json.loads(text[:_HEAD].lstrip().partition("\n")[0])
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_record(line: str, where: str, notes: list[str] | None) -> dict[str, object] | None:
    """Return the object of a line; None for an empty line, and for a torn one, with a note.

    Args:
        notes: of the file, if the line is its last, without a newline.
    """
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if notes is not None:
            notes.append(f"{where} is torn (no newline at its end) and was left out")
            return None
        raise DataError("Cannot read a metrics record", where=where, expected="a JSON object", found=error) from error
    if not isinstance(record, dict):
        text = repr(record)[:60]
        raise DataError("Cannot read a metrics record", where=where, expected="a JSON object", found=text)
    return record


def read_number(text: str, where: str, *, written_as_hex: bool = False, comma: Comma = "") -> Reading:
    """Parse a number; its bits are known if it is written as hex, and if it is nan or inf.

    Args:
        comma: what a single comma before three digits is; refused where that is unknown.

    Raises:
        DataError: it is not a number, or one with a comma of two meanings.
    """
    is_hex = written_as_hex or "0x" in text.lower()
    if "," in text:
        text = _with_point(text, where, comma)
    try:
        value = float.fromhex(text) if is_hex else float(text)
    except (ValueError, OverflowError) as error:
        raise DataError("Cannot read a number", where=where, found=repr(text[:60])) from error
    return Reading(value, is_hex or not math.isfinite(value))


def _with_point(text: str, where: str, comma: Comma) -> str:
    """Return a number that has a comma without separators of thousands, and with a decimal point."""
    is_unclear = re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", text)
    if _GROUPED.fullmatch(text) or (is_unclear and comma == "thousands"):
        return text.replace(",", "")
    if _DECIMAL_COMMA.fullmatch(text) and (not is_unclear or comma == "decimal"):
        return text.replace(".", "").replace(",", ".")
    raise DataError(
        "The comma of a number may be a decimal sign or a separator of thousands",
        where=where,
        found=repr(text[:60]),
        fix="Write the log with decimal points and without separators, as with LC_ALL=C.",
    )
