"""What the tests of imports and exports share."""

from __future__ import annotations

import pytest

from tests.harness import compose
from trainer.commands import convert


@pytest.fixture(autouse=True)
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose each configuration once: that takes longer than a conversion."""
    monkeypatch.setattr(convert, "compose", compose)
