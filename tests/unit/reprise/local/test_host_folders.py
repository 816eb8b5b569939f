"""What a start makes of damage in the local checkpoints of a host."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import CheckpointError, UnreadableError
from reprise.format.lineage import Branch, Lineage
from reprise.loading.blocks import blocks_of
from reprise.loading.reader import open_checkpoint
from reprise.local.host_folders import HostFolders
from reprise.local.local_checkpointer import LocalCheckpointer
from reprise.storage.files import Files
from tests.fakes import flip_bit
from tests.local_folders import RUN, flip, load_on_hosts, save_on_two_hosts, save_shared
from tests.messages import refused
from tests.profiles import slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the folders of two hosts that have saved two iterations, each with a copy of the other's."""
    folder = tmp_path_factory.mktemp("saved")
    save_on_two_hosts(folder, 1, 2, copies=1)
    return folder


def bytes_to_flip(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield a byte of every block, of every header and of every other file, and whether a load on its host reads it."""
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    assert checkpoint.host.host is not None
    own = checkpoint.host.written_by(checkpoint.host.host)
    for block in blocks_of(checkpoint, checkpoint.host.held):
        start, _, _ = next(block.packed.spans(block.lo, block.hi))
        is_read = block.number in own.get(block.place.spec.name, ())
        yield block.place.file, block.place.offset + start, is_read
    for file in sorted(path.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(path)), 20, True


def copied(saved: Path, folder: Path) -> list[Path]:
    shutil.copytree(saved, folder)
    return [folder / f"host{host}" / "local" for host in range(2)]


@pytest.mark.parametrize(("host", "step"), [(0, 3), slow(0, 1), slow(1, 1)])
def test_any_damaged_byte_of_a_host_is_taken_from_the_copy(
    saved: Path, tmp_path: Path, host: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    cases = list(bytes_to_flip(saved / f"host{host}/local/iter_0000002"))
    assert len(cases) > 12
    for number, (name, offset, is_read) in enumerate(cases[::step]):
        folders = copied(saved, tmp_path / str(number))
        flip_bit(folders[host] / "iter_0000002" / name, offset)
        logged = len(caplog.messages)
        assert load_on_hosts(folders) == 2, name
        assert any("local/iter_0000002" in line for line in caplog.messages[logged:]) or not is_read, name


@pytest.mark.parametrize("is_shared", [False, True])
def test_damage_that_no_copy_mends_costs_one_iteration(saved: Path, tmp_path: Path, is_shared: bool) -> None:
    """Unless a shared folder has the iteration too."""
    folders, shared = copied(saved, tmp_path / "hosts"), save_shared(tmp_path / "shared", 2).parent
    for folder in folders:
        name, offset, _ = next(bytes_to_flip(folder / "iter_0000002"))
        flip_bit(folder / "iter_0000002" / name, offset)
    assert load_on_hosts(folders, shared=shared if is_shared else None) == 1 + is_shared


def test_a_new_host_of_two_ranks_takes_what_both_read(saved: Path, tmp_path: Path) -> None:
    folders, copies = copied(saved, tmp_path / "hosts"), dict[int, list[int]]()
    shutil.rmtree(folders[0])
    folders[0].mkdir()

    def note(local: LocalCheckpointer, rank: int) -> None:
        local.folders.survey()
        copies[rank] = local.folders.copied(1)

    assert load_on_hosts(folders, ranks=(2, 1), then=note) == 2
    assert copies == {0: [2], 1: [], 2: [1, 2]}
    load_on_hosts(save_on_two_hosts(tmp_path / "apart", 1), then=note)
    assert copies[0] == copies[1] == []


def test_the_host_of_a_missing_part_is_named(tmp_path: Path) -> None:
    folders = save_on_two_hosts(tmp_path, 1)
    shutil.rmtree(folders[1])
    folders[1].mkdir()
    with pytest.raises(CheckpointError, match=f"1 of 2 parts: {socket.gethostname()}"):
        load_on_hosts(folders)


def test_a_full_disk_is_named_and_costs_no_checkpoint(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = copied(saved, tmp_path / "hosts")
    shutil.rmtree(folders[1] / "iter_0000002")
    with monkeypatch.context() as patch:
        patch.setattr(Files, "free_bytes", lambda *_: 10)
        with refused(UnreadableError, "10 B free"):
            load_on_hosts(folders)
    assert load_on_hosts(folders) == 2


def test_iterations_of_a_branch_given_up_are_not_taken(saved: Path, tmp_path: Path) -> None:
    folders = copied(saved, tmp_path / "hosts")
    assert load_on_hosts(folders, lineage=Lineage((*RUN.branches, Branch("b", 1)))) == 1


def test_two_damaged_parts_each_come_from_the_other_host(saved: Path, tmp_path: Path) -> None:
    folders = copied(saved, tmp_path / "hosts")
    for host, folder in enumerate(folders):
        flip(folder / "iter_0000002", of_host=host)
    assert load_on_hosts(folders) == 2


@pytest.mark.parametrize("host", [0, 1])
def test_damage_within_a_load_costs_one_iteration(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    folders, complete = copied(saved, tmp_path / "hosts"), HostFolders.complete

    def spoil(self: HostFolders, path: Path, *arguments: Any) -> tuple[str, str]:
        outcome = complete(self, path, *arguments)
        if path == folders[host] / "iter_0000002":
            (path / "manifest.json").write_text("{}")
        return outcome

    monkeypatch.setattr(HostFolders, "complete", spoil)
    assert load_on_hosts(folders) == 1
