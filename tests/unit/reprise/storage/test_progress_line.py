"""Lines about transfers that take long."""

from __future__ import annotations

import logging
import time

import pytest

from reprise.storage.progress_line import EVERY_S, ProgressLine


def test_a_line_comes_every_few_seconds_of_long_transfers_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = ProgressLine("saving iteration 7", 8_000_000_000)
    line.add(1_000_000_000)
    now += EVERY_S - 0.1
    line.add(1_000_000_000)
    assert caplog.messages == []
    now += 0.1
    line.add(0)
    assert caplog.messages == ["saving iteration 7: 25% of 8.00 GB, 0.40 GB/s"]
    now += EVERY_S
    line.at(8_000_000_000)
    assert caplog.messages[1:] == ["saving iteration 7: 100% of 8.00 GB, 0.80 GB/s"]
