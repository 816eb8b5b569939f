"""Command-line argument types: numbers and paths."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from reprise.errors import ConfigError
from reprise.storage import IS_URL, is_dir, is_url
from reprise.stores import is_store_url, location

_Number = TypeVar("_Number", int, float)


def _number(kind: Callable[[str], _Number], least: int = 0, below: float = math.inf) -> Callable[[str], _Number]:
    """Return an argument type for numbers in a range."""
    limit = f" and below {below}" if kind is float else ""

    def number(text: str) -> _Number:
        if not least <= (value := kind(text)) < below:
            raise argparse.ArgumentTypeError(f"must be {least} or more{limit}")
        return value

    return number


natural, positive = _number(int), _number(int, 1)
amount, share = _number(float), _number(float, below=1)


def natural_or_all(text: str) -> int | None:
    """Parse an integer, at least 0. `all` becomes None."""
    return None if text == "all" else natural(text)


def local_path(text: str) -> Path:
    """Parse a path on a mounted file system. URLs and empty paths are refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} {IS_URL}")
    return Path(text)


def any_path(text: str) -> Path:
    """Parse a path on a mounted file system, or a store URL. Other URLs and empty paths are refused."""
    if not is_store_url(text):
        return local_path(text)
    try:
        return location(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def existing_folder(text: str) -> Path:
    """Parse the path to an existing folder."""
    if not is_dir(path := local_path(text)):
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    return path
