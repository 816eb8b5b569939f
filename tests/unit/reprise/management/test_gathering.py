"""`reprise.gather`: one whole checkpoint of the folders of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

import reprise
from reprise.errors import CheckpointError
from tests.harness import all_files
from tests.local_folders import flip, save_on_two_hosts, save_shared
from tests.messages import refused

NAME = "iter_0000002"


def test_the_result_equals_a_save_into_a_shared_folder(tmp_path: Path) -> None:
    hosts, out = save_on_two_hosts(tmp_path, 2), tmp_path / "out"
    counts: list[tuple[str, int, int]] = []
    report = reprise.gather(hosts, out, progress=lambda *call: counts.append(call))
    assert all_files(out / NAME) == all_files(save_shared(tmp_path / "shared", 2))
    assert (report.path, report.iteration, report.damage) == (out / NAME, 2, ())
    assert [source.path for source in report.sources] == [host / NAME for host in hosts]
    assert sum(source.copied_bytes for source in report.sources) == report.total_bytes
    assert (counts[0], counts[-1]) == ((NAME, 0, report.total_bytes), (NAME, report.total_bytes, report.total_bytes))
    assert reprise.verify(out)[0].status is reprise.CheckpointStatus.WHOLE


def test_a_damaged_block_is_taken_from_the_copy(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    flip(a / NAME, of_host=0)
    report = reprise.gather([a, str(b)], tmp_path / "out")
    assert [str(a / NAME) in damage for damage in report.damage] == [True]


def test_missing_pieces_and_the_folder_of_a_host_are_refused(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    with pytest.raises(CheckpointError, match="Iteration 2"):
        reprise.gather([a], tmp_path / "out", iteration=2)
    with refused(CheckpointError, str(a)):
        reprise.gather([a, b], a)
    assert not (tmp_path / "out").exists()
