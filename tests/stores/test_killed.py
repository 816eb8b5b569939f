"""A mirror that ends at any call: readers see a whole checkpoint or none, and the next mirror completes the work."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise import copy
from reprise.errors import CheckpointError
from reprise.folder import iteration_name
from reprise.format.lineage import Branch, Lineage
from reprise.format.mirror_record import MirrorRule
from reprise.stores import mirror_pass
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.url import StoreUrl
from tests.stores.saving import RUN, assert_whole, content, give_up, save


class KilledError(BaseException):
    """Ends a mirror in the middle, as SIGKILL does."""


class Killer:
    """Ends what it counts at a call of a number, before or after the call has its effect."""

    def __init__(self, number: int, *, is_after: bool) -> None:
        self.number, self.is_after, self.count = number, is_after, 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **settings: Any) -> Any:
            self.count += 1
            is_due = self.count == self.number
            if is_due and not self.is_after:
                raise KilledError
            try:
                return call(*arguments, **settings)
            finally:
                if is_due:
                    raise KilledError

        return counted


class KillableClient(StoreClient):
    """A client whose every request, and every deletion of an object, is a call of the killer."""

    def __init__(self, root: str, killer: Killer) -> None:
        super().__init__(root)
        for name in ("head", "read", "names", "put", "create", "put_file", "put_parts"):
            setattr(self, name, killer.around(getattr(super(), name)))
        list_all, delete_one = super().objects, killer.around(super().delete)
        self.objects = killer.around(lambda prefix: iter(list(list_all(prefix))))  # type: ignore[method-assign]
        self.delete = lambda keys: [delete_one([key]) for key in keys] and None  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run and its store where a mirror has all to do: upload, replace, take back, delete."""
    root = tmp_path_factory.mktemp("scene")
    folder, url = root / "run" / "checkpoints", StoreUrl.parse(f"file://{root / 'store'}")
    save(folder, [5, 10, 15], files=2)
    passes = MirrorPass(StoreClient(url.root), url, folder, MirrorRule(str(url)))
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


def run_until_killed(folder: Path, store: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch, hosts: int) -> bool:
    """Run the mirrors of some hosts by turns, start one again that is killed; return whether one was."""
    url = StoreUrl.parse(f"file://{store}")
    is_killed = False

    def start(host: int) -> MirrorPass:
        client = KillableClient(url.root, killer)
        return MirrorPass(client, url, folder, MirrorRule(str(url), keep=2), host=host, hosts=hosts)

    with monkeypatch.context() as patch:
        patch.setattr(mirror_pass, "replace_file", killer.around(mirror_pass.replace_file))
        mirrors = [start(host) for host in range(hosts)]
        for _ in range(200):
            ends = []
            for host in range(hosts):
                try:
                    ends.append(mirrors[host].run())
                except KilledError:
                    is_killed = True
                    assert_whole(store, folder)
                    mirrors[host] = start(host)
                    ends.append(False)
                assert_whole(store, folder)
            if all(ends):
                return is_killed
    raise AssertionError("the mirrors do not come to their end")


@pytest.mark.parametrize(
    ("hosts", "is_after"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        (2, True),
    ],
)
def test_a_mirror_may_end_at_any_call(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int, is_after: bool
) -> None:
    number = 0
    while True:
        number += 1
        folder, store = copy_of(scene, tmp_path)
        is_killed = run_until_killed(folder, store, Killer(number, is_after=is_after), monkeypatch, hosts)
        assert assert_whole(store, folder) == [iteration_name(10), iteration_name(20)], number
        leftovers = [name for name in content(store) if Path(name).name.startswith(".upload-")]
        assert not leftovers, number
        assert not (store / iteration_name(15)).exists(), number
        if not is_killed:
            break
    assert number > 80


def test_a_copy_into_a_store_may_end_at_any_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, number = tmp_path / "run", 0
    save(folder, [5], files=2)
    while True:
        number += 1
        store = tmp_path / f"store{number}"
        killer = Killer(number, is_after=bool(number % 2))
        with monkeypatch.context() as patch:
            patch.setattr("reprise.management.copying.require_client", partial(_client, killer))
            with contextlib.suppress(KilledError):
                copy(folder, f"file://{store}")
        assert_whole(store, folder)
        copy(folder, f"file://{store}")
        assert assert_whole(store, folder) == [iteration_name(5)]
        if killer.count < number:
            break
    assert number > 15


def test_a_copy_clears_only_what_a_copy_has_left(tmp_path: Path) -> None:
    folder, store = tmp_path / "run", tmp_path / "store"
    save(folder, [5], files=2)
    target = store / iteration_name(5)
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("of the user")
    with pytest.raises(CheckpointError, match=r"no upload has left them.*notes\.txt"):
        copy(folder, f"file://{store}")
    assert content(store) == {f"{iteration_name(5)}/notes.txt": b"of the user"}
    (target / ".upload-of-another-copy").touch()
    copy(folder, f"file://{store}")
    assert assert_whole(store, folder) == [iteration_name(5)]


def _client(killer: Killer, url: StoreUrl) -> StoreClient:
    return KillableClient(url.root, killer)


@pytest.mark.nightly
def test_processes_that_are_killed_at_random_moments(tmp_path: Path) -> None:
    """Kill the mirrors of two hosts, as processes, 500 times, while the run saves and goes back now and then."""
    folder, store = tmp_path / "run", tmp_path / "store"
    draw = random.Random(0)
    save(folder, [5, 10])
    for number in range(500):
        if number % 10 == 0:
            newest = 10 + 5 * (number // 10)
            if number % 50 == 40:
                give_up(folder, newest)
            save(folder, [newest + 5 * (number % 50 != 40)], files=6, nonce=f"n{number}", add=number / 1024)
        mirrors = [mirror_of(folder, store, host) for host in range(2)]
        victim = mirrors[draw.randrange(2)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(draw.uniform(0.1, 1.5))
        assert_whole(store, folder)
        for mirror in mirrors:
            mirror.kill()
            mirror.wait(PROCESS_S)
        assert_whole(store, folder)
    mirror_of(folder, store, 0, "--once", hosts=1).wait(PROCESS_S)
    saved = sorted(path.name for path in folder.glob("iter_???????"))
    assert assert_whole(store, folder) == saved


PROCESS_S = 120.0


def mirror_of(folder: Path, store: Path, host: int, *words: str, hosts: int = 2) -> subprocess.Popen[bytes]:
    """Start the mirror of a host."""
    numbers = ("--host", str(host), "--hosts", str(hosts))
    command = [sys.executable, "-m", "reprise.stores.mirror", str(folder), f"file://{store}", *numbers, *words]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)
