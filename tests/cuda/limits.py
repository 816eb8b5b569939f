"""The time that the tests of a device have: a lent machine is taken back."""

from __future__ import annotations

import os
import time

SECONDS = "CUDA_TEST_SECONDS"  # in the environment
_RESERVE_S = 30.0  # in which a test that has begun may end
_MOST_S = float(os.environ.get(SECONDS, "450"))
_END = time.monotonic() + _MOST_S


def left_s() -> float:
    """Return the seconds in which a test that has begun must end, at least one."""
    return max(1.0, _END - time.monotonic())


def reason() -> str:
    """Return why no further test begins, or nothing."""
    return f"left out: the {_MOST_S:.0f} s of these tests are over" if left_s() < _RESERVE_S else ""
