"""What the test of a store leaves there."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from reprise.stores import probe

pytest.importorskip("obstore")


def fail(error: OSError, *_: object) -> None:
    raise error


def test_a_store_that_fails_halfway_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = probe.CHILD_CLIENT

    class Failing:
        def __getattr__(self, call: str) -> object:
            return partial(fail, OSError(errno.EIO, "it failed")) if call == "read_text" else getattr(client, call)

    monkeypatch.setattr(probe, "CHILD_CLIENT", Failing())
    (tmp_path / "kept").mkdir()
    (finding,) = probe.probe_store(f"file://{tmp_path}/kept/new/run")
    assert finding == ("objects", False, "it failed")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
