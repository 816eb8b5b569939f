"""Numbers of JSON documents: checked when read, and null in place of NaN and infinity when written."""

from __future__ import annotations

import json
import math

MAX_INTEGER = 2**63 - 1  # the largest that numpy and torch count with
_MOST_OF_A_VALUE, _MOST_PARTS, _MOST_BITS = 200, 10, 256


def shown(value: object) -> str:
    """Return a value of a file for a message: a short text, made in the time that it takes to read it.

    Of what is neither a number, a text nor a list of them, the type alone is shown.
    """
    if isinstance(value, str | bytes):
        return repr(value[:_MOST_OF_A_VALUE]) + ("..." if len(value) > _MOST_OF_A_VALUE else "")
    if isinstance(value, list | tuple):
        parts = [shown(part) if not isinstance(part, list | tuple | dict) else "..." for part in value[:_MOST_PARTS]]
        text = ", ".join(parts) + (", ..." if len(value) > _MOST_PARTS else "")
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if value is None or isinstance(value, bool | float | complex):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= _MOST_BITS else f"a number of {value.bit_length()} bits"
    return f"an object of {type(value).__name__}"


def integer(value: object, *, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer from 0 to `most`.

    Raises:
        ValueError: otherwise.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{shown(value)} is not an integer from 0 to {most}")
    return value


def finite_number(value: object, *, least: float = -math.inf) -> float:
    """Return `value` as a float if it is a finite number, at least `least` and below 2**63.

    Raises:
        ValueError: otherwise.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not max(least, -MAX_INTEGER) <= value <= MAX_INTEGER:  # type: ignore[operator]
        raise ValueError(
            f"{shown(value)} is not a finite number" + (f" of at least {least:g}" if least > -math.inf else "")
        )
    return float(value)  # type: ignore[arg-type]


def step_count(value: object) -> float:
    """Return `value` as a float if it is a whole number from 0 on; optimizers keep their steps as integers or floats.

    Raises:
        ValueError: otherwise.
    """
    steps = finite_number(value, least=0)
    if not steps.is_integer():
        raise ValueError(f"{shown(value)} is not a whole number")
    return steps


def dumps(value: object) -> str:
    """Return standard JSON on one line, with null in place of NaN and infinity."""
    return json.dumps(finite(value), allow_nan=False)


def finite(value: object) -> object:
    """Return `value` with None in place of every NaN and infinity in it."""
    if isinstance(value, dict):
        return {key: finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
