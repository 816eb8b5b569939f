"""`reprise.list`: what each checkpoint of a folder is, without reading its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reprise
from reprise import CheckpointStatus
from reprise.format import manifest
from tests.fakes import flip_bit
from tests.local_folders import save_on_two_hosts


def save(folder: Path, *iterations: int) -> Path:
    for iteration in iterations:
        reprise.save(folder, torch.nn.Linear(3, 2), iteration=iteration, state={"epoch": iteration})
    return folder


UNCHECKED, WHOLE, DAMAGED = CheckpointStatus.UNCHECKED, CheckpointStatus.WHOLE, CheckpointStatus.DAMAGED


def statuses(*folders: Path, check: int | None) -> list[CheckpointStatus]:
    return [summary.status for summary in reprise.list(*folders, check=check)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the manifests that are parsed."""
    where, parse = list[object](), manifest.from_bytes

    def counted(data: bytes, **arguments: Any) -> manifest.Manifest:
        where.append(arguments["where"])
        return parse(data, **arguments)

    monkeypatch.setattr(manifest, "from_bytes", counted)
    return where


def test_the_newest_are_checked_and_older_ones_only_listed(tmp_path: Path, opened: list[object]) -> None:
    folder = save(tmp_path, 1, 2, 3, 4)
    (folder / "iter_0000001" / "hold").touch()
    whole = reprise.list(folder)
    opened.clear()
    listed = reprise.list(folder, check=2)
    assert opened == [folder / "iter_0000003" / "manifest.json", folder / "iter_0000004" / "manifest.json"]
    assert [summary.status for summary in listed] == [UNCHECKED, UNCHECKED, WHOLE, WHOLE]
    for old, same in zip(listed, whole, strict=True):
        assert (old.iteration, old.total_bytes, old.state, old.is_pinned, old.written_at) == (
            same.iteration, same.total_bytes, same.state, same.is_pinned, same.written_at,
        )  # fmt: skip
    opened.clear()
    assert statuses(folder, check=0) == [UNCHECKED] * 4
    assert opened == []


def test_damage_is_found_in_what_is_checked_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3)
    for iteration in (1, 3):
        flip_bit(folder / f"iter_000000{iteration}" / "model.safetensors", -32)  # the first byte of the tensors
    assert statuses(folder, check=2) == [UNCHECKED, WHOLE, DAMAGED]
    assert statuses(folder, check=None) == [DAMAGED, WHOLE, DAMAGED]
    (folder / "iter_0000001" / "manifest.json").unlink()
    (folder / "iter_0000002" / "trainer_state.json").write_text("{}")
    save(folder, 4)
    (folder / "iter_0000003" / "trainer_state.json").unlink()
    assert [str(s.problem) for s in reprise.list(folder, check=0)] == [str(s.problem) for s in reprise.list(folder)]
    assert statuses(folder, check=0) == [DAMAGED] * 3 + [UNCHECKED]


def test_a_part_is_named_once_it_is_checked(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    assert {summary.status for summary in reprise.list(a, b)} == {CheckpointStatus.PART}
    (part,) = reprise.list(a, check=0)
    assert (part.status, part.share, part.total_bytes) == (UNCHECKED, None, reprise.list(a)[0].total_bytes)
