"""Types of command-line arguments: numbers and paths."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from reprise.errors import ConfigError
from reprise.storage import is_dir, is_url, url_problem
from reprise.stores import is_store_url, location


def positive(text: str) -> int:
    """Return an integer of at least 1; argparse refuses any other."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def natural(text: str) -> int:
    """Return an integer of at least 0; argparse refuses any other."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def natural_or_all(text: str) -> int | None:
    """Return an integer of at least 0, or None for `all`; argparse refuses any other."""
    return None if text == "all" else natural(text)


def share(text: str) -> float:
    """Return a number from 0 to below 1; argparse refuses any other, such as a percentage."""
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError("must be 0 or more and below 1")
    return number


def amount(text: str) -> float:
    """Return a finite number of at least 0; argparse refuses any other."""
    if not (math.isfinite(number := float(text)) and number >= 0):
        raise argparse.ArgumentTypeError("must be a finite number, 0 or more")
    return number


def local_path(text: str) -> Path:
    """Return a path of a mounted file system; argparse refuses URLs and an empty path."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} {url_problem(text)}")
    return Path(text)


def any_path(text: str) -> Path:
    """Return a path of a mounted file system, or the URL of a store; argparse refuses other URLs and an empty path."""
    if not is_store_url(text):
        return local_path(text)
    try:
        return location(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def existing_folder(text: str) -> Path:
    """Return the path of an existing folder; argparse refuses others."""
    if not is_dir(path := local_path(text)):
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    return path
