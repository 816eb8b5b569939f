"""How many examples a run tries: `make test` a sample, `make test-all` all of them, `make test-nightly` many more."""

from __future__ import annotations

import os

from hypothesis import settings

TIER = os.environ.get("REPRISE_TESTS", "gate")
_SHARE = {"gate": 0.2, "all": 1.0, "nightly": 20.0}[TIER]


def scaled(count: int) -> int:
    """Return how many of the examples that `make test-all` tries this run tries."""
    return max(10, round(count * _SHARE))


settings.register_profile(
    "reprise", deadline=None, derandomize=TIER != "nightly", print_blob=True, max_examples=scaled(100)
)
settings.load_profile("reprise")


def examples(count: int) -> settings:
    """Return the settings of a Hypothesis test that tries `count` examples in `make test-all`."""
    return settings(max_examples=scaled(count))
