"""What `make test`, `make test-all` and `make test-nightly` try: the marks of cases, the examples, the seed."""

from __future__ import annotations

import os
from datetime import date, datetime
from typing import Any

import pytest
from hypothesis import settings

TIER = os.environ.get("REPRISE_TESTS", "gate")
# The date, by which a run draws what it tries of many cases; another one repeats those of its day.
SEED = int(os.environ.get("REPRISE_SEED") or f"{date.today():%Y%m%d}")
_SHARE = {"gate": 0.2, "all": 0.5, "nightly": 20.0}[TIER]


def scaled(count: int) -> int:
    """Return how many examples this run tries: a fifth of `count` in the gate, half in `make test-all`."""
    return max(10, round(count * _SHARE))


NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]

settings.register_profile(
    "reprise", deadline=None, derandomize=TIER != "nightly", print_blob=True, max_examples=scaled(100)
)
settings.load_profile("reprise")


def examples(count: int) -> settings:
    """Return the settings of a Hypothesis test that tries `scaled(count)` examples."""
    return settings(max_examples=scaled(count))


def slow(*values: Any, id: str | None = None) -> Any:
    """Return a case that the gate leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def nightly(*values: Any, id: str | None = None) -> Any:
    """Return a case of the nightly run alone."""
    return pytest.param(*values, marks=NIGHTLY, id=id)


def day() -> int:
    """Return the number of the day of SEED."""
    try:
        return datetime.strptime(str(SEED), "%Y%m%d").toordinal()
    except ValueError:
        return SEED
