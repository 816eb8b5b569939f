"""What local checkpoints send, by hosts."""

from __future__ import annotations

import pytest

from scripts.bench import scale_local


def test_two_hosts_save_and_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_local, "_TENSORS", 2)
    figures = scale_local.measure(2)
    assert set(figures) == {f"{what} {unit}" for what in scale_local.STEPS if what for unit in ("kB out", "s")}
    assert 0 < figures["candidate kB out"] < figures["later save kB out"] < figures["first save kB out"]
