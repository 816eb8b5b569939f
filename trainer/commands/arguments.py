"""Command-line argument types: numbers and paths."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from reprise.errors import ConfigError
from reprise.storage import IS_URL, is_dir, is_url
from reprise.stores import is_store_url, location


def positive(text: str) -> int:
    """Parse an integer, at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def natural(text: str) -> int:
    """Parse an integer, at least 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def natural_or_all(text: str) -> int | None:
    """Parse an integer, at least 0. `all` becomes None."""
    return None if text == "all" else natural(text)


def share(text: str) -> float:
    """Parse a number from 0 to below 1. A percentage is refused."""
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError("must be 0 or more and below 1")
    return number


def amount(text: str) -> float:
    """Parse a finite number, at least 0."""
    if not (math.isfinite(number := float(text)) and number >= 0):
        raise argparse.ArgumentTypeError("must be a finite number, 0 or more")
    return number


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
