"""`reprise.verify`: every byte against its digest."""

from __future__ import annotations

from pathlib import Path

import pytest

import reprise
from reprise import CheckpointStatus
from reprise.storage.files import Files
from tests.local_folders import flip, save_on_two_hosts
from tests.unit.reprise.management.test_listing import save


def test_every_byte_is_read_and_reported(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    calls: list[tuple[str, int, int]] = []
    results = reprise.verify(tmp_path, progress=lambda *call: calls.append(call))
    assert [(r.iteration, r.status, r.checked_bytes) for r in results] == [(1, "whole", 32), (2, "whole", 32)]
    for name in ("iter_0000001", "iter_0000002"):
        counts = [count for called, count, total in calls if called == name and total == 32]
        assert (counts[0], counts[-1], counts == sorted(counts)) == (0, 32, True)


def test_a_flipped_bit_is_named_and_the_other_is_whole(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2)
    weights = folder / "iter_0000001" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    damaged, whole = reprise.verify(folder)
    assert (damaged.status, damaged.checked_bytes) == (CheckpointStatus.DAMAGED, None)
    assert str(weights) in str(damaged.problem)
    assert (whole.status, whole.problem) == (CheckpointStatus.WHOLE, None)
    (alone,) = reprise.verify(folder / "iter_0000002")
    assert alone == whole


def test_what_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "open_for_reading", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        (result,) = reprise.verify(folder)
    assert result.status is CheckpointStatus.UNREADABLE
    assert reprise.verify(folder)[0].status is CheckpointStatus.WHOLE


def test_damage_in_one_of_two_copies_leaves_the_hosts_whole(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    flip(a / "iter_0000002", of_host=1)
    assert [result.missing_everywhere for result in reprise.verify(a, b)] == ["", ""]
    flip(b / "iter_0000002", of_host=1)
    results = reprise.verify(a, b)
    assert all((result.missing_everywhere or "").startswith("1 of 2 parts: ") for result in results)
    assert {result.status for result in results} == {CheckpointStatus.DAMAGED}
