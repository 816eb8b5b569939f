"""The hold on a local checkpoint, which its host keeps for its upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.loading.reader import open_checkpoint
from reprise.local.host_part import HostParts
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder
from tests.local_folders import save_on_two_hosts


def test_retention_leaves_the_chosen_one_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders = [CheckpointFolder(path, FILE_SYSTEM) for path in save_on_two_hosts(tmp_path, 1)]
    parts = HostParts(folders[0])
    part = parts.hold(1, open_checkpoint(folders[0].iteration(1), FILE_SYSTEM).digest)
    assert part is not None
    assert not part.host.is_whole
    save_on_two_hosts(tmp_path, 2, 3, keep=1)
    assert [sorted(folder.committed()) for folder in folders] == [[1, 3], [3]]
    parts.release()
    save_on_two_hosts(tmp_path, 4, keep=1)
    assert [sorted(folder.committed()) for folder in folders] == [[4], [4]]


def test_damaged_files_are_named_once_and_are_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders = [CheckpointFolder(path, FILE_SYSTEM) for path in save_on_two_hosts(tmp_path, 1)]
    digest = open_checkpoint(folders[0].iteration(1), FILE_SYSTEM).digest
    (folders[0].iteration(1) / "trainer_state.json").write_bytes(b"{}")
    parts = HostParts(folders[0])
    assert [parts.hold(1, digest), parts.find(1, digest)] == [None, None]
    assert parts.chosen is None
    assert not list(folders[0].root.glob("*/hold.*"))
    assert caplog.text.count("is not uploaded from this host") == 1
