"""The name that a misspelled one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name that is most like `name`, or None if none is alike.

    A dotted name with the same last word is preferred: `lr` stands for `optimizer.lr`.

    Args:
        cutoff: the least ratio of equal characters, from 0 to 1.
    """
    known = list(names)
    word = name.rpartition(".")[2]
    if same := [one for one in known if one.rpartition(".")[2] == word]:
        known, cutoff = same, 0.0
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None
