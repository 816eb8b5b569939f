"""A mirror that ends at any call: readers see a whole checkpoint or none, and the next mirror completes the work."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise import copy
from reprise.errors import CheckpointError
from reprise.format.lineage import Branch, Lineage
from reprise.format.mirror_record import MirrorRule
from reprise.storage import iteration_name
from reprise.stores import mirror_pass
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.path import store_path
from reprise.stores.store import CHILD
from reprise.stores.upload import upload
from tests.messages import refused
from tests.profiles import SEED, day, slow
from tests.stores.saving import RUN, WatchedClient, assert_whole, content, give_up, save


class KilledError(BaseException):
    """Ends a mirror in the middle, as SIGKILL does."""


FAILURE = OSError(errno.EIO, "the store fails once", "a request")


class Killer:
    """Ends what it counts at a call of a number, before or after the call has its effect, by an error."""

    def __init__(self, number: int, *, is_after: bool, error: BaseException | None = None) -> None:
        self.number, self.is_after, self.count, self.error = number, is_after, 0, error or KilledError()

    def watch(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        is_due = self.count == self.number
        if is_due and not self.is_after:
            raise self.error
        try:
            return call(*arguments)
        finally:
            if is_due:
                raise self.error


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run and its store where a mirror has all to do: upload, replace, take back, delete."""
    root = tmp_path_factory.mktemp("scene")
    folder, url = root / "run" / "checkpoints", store_path(f"file://{root / 'store'}")
    save(folder, [5, 10, 15], files=2)
    passes = MirrorPass(StoreClient(), folder, MirrorRule(str(url)))
    while not passes.run():
        pass
    for iteration in (10, 15):
        give_up(folder, iteration)
    save(folder, [10, 20], files=2, lineage=Lineage((*RUN.branches, Branch("another", 5))), nonce="m", add=0.5)
    return root


def copy_of(scene: Path, to: Path) -> tuple[Path, Path]:
    """Return the run's folder and the store of a copy of the scene."""
    for name in ("run", "store"):
        shutil.rmtree(to / name, ignore_errors=True)
        shutil.copytree(scene / name, to / name)
    return to / "run" / "checkpoints", to / "store"


def run_until_killed(folder: Path, store: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a mirror, start it again if it is killed; return whether it was, or failed."""
    url = store_path(f"file://{store}")
    is_killed = False

    def start() -> MirrorPass:
        return MirrorPass(WatchedClient(killer.watch), folder, MirrorRule(str(url), keep=2))

    with monkeypatch.context() as patch:
        patch.setattr(mirror_pass, "replace_file", partial(killer.watch, mirror_pass.replace_file))
        mirror = start()
        for _ in range(200):
            is_done = False
            try:
                is_done = mirror.run()
            except (KilledError, OSError) as error:
                is_killed = True
                mirror = start() if isinstance(error, KilledError) else mirror
            assert_whole(store, folder)
            if is_done:
                return is_killed
    raise AssertionError("the mirror does not come to its end")


@pytest.mark.parametrize(
    ("is_after", "step", "error"),
    [
        (True, 7, None),
        (False, 7, FAILURE),
        slow(False, 1, None),
        slow(True, 1, None),
        slow(True, 1, FAILURE),
        slow(False, 1, FAILURE),
    ],
)
def test_a_mirror_may_end_or_fail_at_any_call(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after: bool, step: int, error: OSError | None
) -> None:
    print(f"REPRISE_SEED={SEED}")
    number, is_killed = 1 + day() % step, True
    while is_killed:
        folder, store = copy_of(scene, tmp_path)
        is_killed = run_until_killed(folder, store, Killer(number, is_after=is_after, error=error), monkeypatch)
        assert assert_whole(store, folder) == [iteration_name(10), iteration_name(20)], number
        assert not [name for name in content(store) if Path(name).name.startswith(".upload-")], number
        assert not (store / iteration_name(15)).exists(), number
        number += step
    assert number > 60


@pytest.mark.parametrize("step", [5, slow(1)])
def test_a_copy_into_a_store_may_end_at_any_call(tmp_path: Path, step: int) -> None:
    print(f"REPRISE_SEED={SEED}")
    folder, number, is_killed = tmp_path / "run", 1 + day() % step, True
    save(folder, [5], files=2)
    while is_killed:
        store = tmp_path / f"store{number}"
        killer = Killer(number, is_after=bool(number // step % 2))
        with contextlib.suppress(KilledError):
            target = store_path(f"file://{store / iteration_name(5)}")
            source = folder / iteration_name(5)
            upload(WatchedClient(killer.watch), target, source, CheckpointFiles.at(source))
        assert_whole(store, folder)
        copy(folder, f"file://{store}")
        assert assert_whole(store, folder) == [iteration_name(5)]
        is_killed = killer.count >= number
        number += step
    CHILD.end()
    assert number > 10


def test_an_upload_to_a_taken_folder_is_not_committed(tmp_path: Path) -> None:
    target, uploads, left = store_path(f"file://{tmp_path / 'store'}"), list[Callable[..., None]](), list[str]()
    for add in (0, 0.5):
        save(tmp_path / f"run{add}", [5], add=add)
        source = tmp_path / f"run{add}" / iteration_name(5)
        files = CheckpointFiles.at(source)
        uploads.append(partial(upload, StoreClient(), target, source, files))

    def take(name: str) -> None:
        left.append(name)
        if len(left) == len(files.sizes):
            uploads[1]()

    with pytest.raises(FileNotFoundError, match="replaced or deleted"):
        uploads[0](take)
    assert content(tmp_path / "store") == content(tmp_path / "run0.5" / iteration_name(5))


def test_a_copy_clears_only_what_an_upload_has_left(tmp_path: Path) -> None:
    folder, store = tmp_path / "run", tmp_path / "store"
    save(folder, [5], files=2)
    target = store / iteration_name(5)
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("of the user")
    with refused(CheckpointError, str(tmp_path)):
        copy(folder, f"file://{store}")
    assert content(store) == {f"{iteration_name(5)}/notes.txt": b"of the user"}
    (target / ".upload-of-another-copy").touch()
    copy(folder, f"file://{store}")
    assert assert_whole(store, folder) == [iteration_name(5)]
    copied, source = tmp_path / "copied", f"file://{store / iteration_name(5)}"
    copy(source, f"file://{copied}")  # by a stream from store to store
    assert content(copied) == content(store)
    CHILD.end()
