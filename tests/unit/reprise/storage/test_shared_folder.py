"""Every rank sees the checkpoint folder of rank 0, sooner or later, or nothing is saved or loaded."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.format.names import STATE
from reprise.loading.choose import LoadSource
from reprise.loading.reader import open_checkpoint, open_same
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.storage import shared_folder
from reprise.storage.files import FILE_SYSTEM, Files
from tests.fakes import FailingFiles, run_ranks, tcp_store
from tests.messages import refused
from tests.unit.reprise.commit.test_protocol import ROWS, SPEC, contents

UNSEEN = "This host does not see the checkpoint folder of rank 0"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "SEEN_WITHIN_S", 0.1)


def start(channel: StoreChannel, folder: Path, files: Files = FILE_SYSTEM) -> Checkpointer:
    checkpointer = Checkpointer(SavePolicy(folder), channel, nonce="n", files=files)
    try:
        checkpointer.start()
    except TrainerError:
        checkpointer.close()
        raise
    return checkpointer


def save(
    channel: StoreChannel,
    folder: Path,
    files: Files = FILE_SYSTEM,
    *,
    before: Callable[[], None] = lambda: None,
    value: float = 1.0,
    iteration: int = 1,
) -> SaveReport:
    """Start, call `before`, and save a tensor of rows of that `value`."""
    checkpointer = start(channel, folder, files)
    before()
    live = tuple(ROWS.live(channel.rank, [SPEC], {"w": torch.full(SPEC.shape, value)}))
    try:
        report = checkpointer.save(iteration, replace(contents(channel.rank, iteration), live=live))
        assert report is not None
        return report
    finally:
        checkpointer.close()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class LateNames(Files):
    """A file system that shows files and folders, by how their names end, only after some looks."""

    def __init__(self, ending: str, looks: int) -> None:
        self._ending, self.looks = ending, looks

    def _look(self, path: Path) -> Path:
        if path.name.endswith(self._ending):
            self.looks -= 1
            if self.looks >= 0:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path

    def size(self, path: Path) -> int:
        return super().size(self._look(path))

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(self._look(path))

    def tree(self, path: Path, folders: Collection[str] | None = None) -> dict[str, os.stat_result]:
        statuses = super().tree(path, folders)
        for name in [name for name in statuses if name.endswith(self._ending)]:
            with suppress(FileNotFoundError):
                self._look(path / name)
                continue
            del statuses[name]
        return statuses


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("has_folder", [False, True])
def test_no_rank_starts_where_one_has_another_folder(tmp_path: Path, has_folder: bool) -> None:
    folders = [tmp_path / "of0", tmp_path / "of1"]
    if has_folder:
        folders[1].mkdir()
        (folders[1] / "lock").write_text("{}")  # another job's
    for error in run_ranks(2, lambda channel: start(channel, folders[channel.rank])):
        assert isinstance(error, CheckpointError)
        assert f"{UNSEEN} (host {os.uname().nodename}, {folders[1]}/lock)" in str(error)
    assert files_below(tmp_path) == ["of0/lock", *["of1/lock"] * has_folder]


@pytest.mark.parametrize("name", ["lock", ".partial"])
def test_a_rank_that_sees_the_folder_late_starts_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    late = LateNames(name, 4)
    monkeypatch.setattr(shared_folder, "os", SimpleNamespace(**{**vars(os), "stat": late.stat}))
    reports = run_ranks(2, lambda channel: save(channel, tmp_path, late if channel.rank else FILE_SYSTEM))
    assert late.looks < 0
    for report in reports:
        assert isinstance(report, SaveReport)
        assert report.error is None
    names = ["manifest.json", "model.safetensors", "model.safetensors.index.json", STATE]
    assert files_below(tmp_path / "iter_0000001") == names
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("loser", [0, 1])
def test_a_rank_that_writes_elsewhere_fails_the_save_cleanly(tmp_path: Path, loser: int) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
    links = [tmp_path / f"link{rank}" for rank in (0, 1)]
    for link in links:
        link.symlink_to(shared)

    def lose() -> None:
        links[loser].unlink()
        links[loser].symlink_to(other)
        shutil.copy(shared / "lock", other)  # as a copy of the folder would have it

    def call(channel: StoreChannel) -> SaveReport:
        return save(channel, links[channel.rank], before=lose if channel.rank == loser else lambda: None)

    for report in run_ranks(2, call, store=tcp_store):
        assert isinstance(report, SaveReport)
        assert f"{UNSEEN} (host {os.uname().nodename}, {links[1]}/.iter_0000001.n-1.partial)" in str(report.error)
    assert {path.split("/")[1] for path in files_below(tmp_path)} == {"lock"}


class CallAtSync(Files):
    """A file system that calls something when a file has been synced."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._call()


def test_a_folder_that_changes_during_a_save_fails_it(tmp_path: Path) -> None:
    shared, other, link = (tmp_path / name for name in ("shared", "other", "link"))
    for folder in (shared, other):
        folder.mkdir()
    link.symlink_to(shared)

    def lead_elsewhere() -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(other)

    def call(channel: StoreChannel) -> SaveReport:
        return save(channel, link, CallAtSync(lead_elsewhere)) if channel.rank else save(channel, shared)

    for report in run_ranks(2, call, store=tcp_store):
        assert isinstance(report, SaveReport)
        assert f"This host's checkpoint folder changed during a save (host {os.uname().nodename}, {link})" in str(
            report.error
        )
    assert files_below(shared) == ["lock"]


@pytest.mark.parametrize("kind", ["free_bytes", "make_folder", "write"])
def test_a_save_rank_0_cannot_begin_fails_alike_on_all_ranks(tmp_path: Path, kind: str) -> None:
    for report in run_ranks(
        2, lambda channel: save(channel, tmp_path, FailingFiles(kind if channel.rank == 0 else ""))
    ):
        assert isinstance(report, SaveReport)
        assert "Input/output error" in str(report.error)
        assert UNSEEN not in str(report.error)
    assert files_below(tmp_path) == ["lock"]


class ReplacedFiles(Files):
    """A file system that shows what was under a name before, for some looks."""

    def __init__(self, path: Path, older: Path, looks: int) -> None:
        self.looks = looks
        self._path, self._older = path, older

    def _shown(self, path: Path) -> Path:
        if path == self._path / "manifest.json":
            self.looks -= 1
        return self._older / path.relative_to(self._path) if self.looks >= 0 else path

    def size(self, path: Path) -> int:
        return super().size(self._shown(path))

    def open_for_reading(self, path: Path) -> int:
        return super().open_for_reading(self._shown(path))


@pytest.mark.usefixtures("impatient")
def test_every_rank_loads_the_same_checkpoint_or_is_named(tmp_path: Path) -> None:
    older, newer = tmp_path / "1.0" / "iter_0000001", tmp_path / "2.0" / "iter_0000001"
    for path, value in ((older, 1.0), (newer, 2.0)):
        run_ranks(2, partial(save, folder=path.parent, value=value))
    digests = [open_checkpoint(path, Files()).digest for path in (newer, older)]
    late = [LateNames(name, 2) for name in ("model.safetensors", STATE)]
    for files in (ReplacedFiles(newer, older, 2), *late):
        assert open_same(newer, digests[0], files).digest == digests[0]
        assert files.looks < 0
    with refused(MismatchError, os.uname().nodename, str(older / "manifest.json"), *digests):
        open_same(older, digests[0], Files())
    run_ranks(2, partial(save, folder=newer.parent, iteration=2))

    def load(channel: StoreChannel) -> object:
        files = LateNames(STATE, 1_000_000) if channel.rank else FILE_SYSTEM
        restorer = Restorer(channel, nonce="n", files=files)
        live = ROWS.live(channel.rank, [SPEC], {"w": torch.empty(SPEC.shape)})
        return restorer.restore(LoadSource(newer.parent), check=lambda _: None, live=lambda _: live)

    for error in run_ranks(2, load):  # neither takes the older one
        assert isinstance(error, MismatchError)
        assert f"host {os.uname().nodename}" in str(error)
        assert f"iter_0000002/{STATE}" in str(error)
