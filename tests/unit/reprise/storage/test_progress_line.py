"""Lines about transfers that take long."""

from __future__ import annotations

import logging
import time

import pytest

from reprise.storage.progress_line import EVERY_S, log_progress


def test_a_line_comes_every_few_seconds_of_long_loads_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    note = log_progress("loading iteration 7", 8_000_000_000)
    note(1_000_000_000)
    now += EVERY_S - 0.1
    note(2_000_000_000)
    assert caplog.messages == []
    now += 0.1
    note(2_000_000_000)
    assert caplog.messages == ["loading iteration 7: 25% of 8.00 GB, 0.40 GB/s"]
    now += EVERY_S
    note(8_000_000_000)
    assert caplog.messages[1:] == ["loading iteration 7: 100% of 8.00 GB, 0.80 GB/s"]
