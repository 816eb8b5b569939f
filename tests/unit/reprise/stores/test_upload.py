"""Uploads to a store that fails now and then."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from reprise import copy, save, verify
from reprise.stores import upload as upload_module
from reprise.stores.store import end_child
from reprise.stores.upload import Upload
from tests.unit.reprise.loading.test_choose import filled

TRIES = 1 + len(upload_module._PAUSES_S)


@pytest.mark.parametrize("failures", [TRIES - 1, TRIES])
def test_the_tries_of_a_copy_are_counted_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    tries, send = Counter[str](), Upload._send

    def fail_first(upload: Upload, name: str) -> None:
        tries[name] += 1
        if tries[name] <= failures:
            raise OSError(errno.EIO, "the store is away", name)
        send(upload, name)

    monkeypatch.setattr(Upload, "_send", fail_first)
    monkeypatch.setattr(upload_module.time, "sleep", lambda _: None)
    path, target = save(tmp_path / "run", filled(1), iteration=1), tmp_path / "store" / "iter_0000001"
    try:
        if failures < TRIES:
            copy(path, f"file://{target}")
            assert verify(target)[0].problem is None
            assert len(tries) > 1
        else:
            with pytest.raises(OSError, match="away"):
                copy(path, f"file://{target}")
    finally:
        end_child()
