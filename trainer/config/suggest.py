"""The name most like a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name most like `name`, or None if none is alike.

    A dotted name with the same last word is preferred: `lr` stands for `optimizer.lr`.

    Args:
        cutoff: the least ratio of equal characters, from 0 to 1.
    """
    candidates = list(names)
    word = name.rpartition(".")[2]
    if same := [candidate for candidate in candidates if candidate.rpartition(".")[2] == word]:
        candidates, cutoff = same, 0.0
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None
