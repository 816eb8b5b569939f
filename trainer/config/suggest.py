"""Finds the name most similar to a misspelled name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `name`, or None if no name is similar.

    A dotted name with the same last word wins: `lr` stands for `optimizer.lr`.
    """
    candidates, cutoff = list(names), 0.6
    word = name.rpartition(".")[2]
    if same := [candidate for candidate in candidates if candidate.rpartition(".")[2] == word]:
        candidates, cutoff = same, 0.0
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None
