"""The five rules of a mirror, pass by pass; a folder stands for the store."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import CheckpointError
from reprise.format import HOST, MANIFEST
from reprise.format.lineage import FRESH, Branch, Lineage, Parent
from reprise.format.mirror_record import MIRROR, MirrorRule, read_record
from reprise.storage import FolderLock, is_locked, iteration_name
from reprise.stores import mirror_run
from reprise.stores.mirror import LOCK_FOLDER, Mirror, follow
from reprise.stores.mirror_pass import CLAIM, MirrorPass
from reprise.stores.path import store_path
from reprise.stores.upload import MARK
from reprise.stores.url import place_of
from tests.fakes import JOIN_S
from tests.profiles import slow
from tests.stores.saving import RUN, WatchedClient, assert_whole, committed, content, give_up, lose, save

ANOTHER_BRANCH = Lineage((*RUN.branches, Branch("another", 5)))


class Site:
    """A run's folder and its store.

    Attributes:
        puts: the objects that were written, in order.
        left: the number of requests before the next that fails.
    """

    def __init__(self, root: Path) -> None:
        self.folder, self.store = root / "run" / "checkpoints", root / "store"
        self.url = store_path(f"file://{self.store}")
        self.puts, self.left = list[str](), 0

    def passes(self, *, keep: int = 0, interval: int = 0, fails_at: int = 0) -> MirrorPass:
        self.left = fails_at
        client, rule = WatchedClient(self._request), MirrorRule(str(self.url), interval, keep)
        return MirrorPass(client, self.folder, rule)

    def _request(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if call.__name__ in ("put", "create"):
            self.puts.append(place_of(arguments[0])[1])
        if self.left == 0:
            raise OSError(errno.EIO, "the store fails once", str(arguments[0]))
        return call(*arguments)

    def mirror(self, *, at_end: bool = False, keep: int = 0, interval: int = 0) -> None:
        """Run a new mirror until nothing is left to do."""
        finish(self.passes(keep=keep, interval=interval), at_end=at_end)

    def beside(self, name: str) -> Site:
        """Return another run, with the same store."""
        other = Site(self.store.parent / name)
        other.store, other.url = self.store, self.url
        return other

    def names(self) -> list[str]:
        return assert_whole(self.store, self.folder)


def finish(passes: MirrorPass, *, at_end: bool = False) -> None:
    """Run passes until nothing is left to do."""
    for _ in range(50):
        if passes.run(at_end=at_end):
            return
    raise AssertionError("the mirror does not come to its end")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def names_of(*iterations: int) -> list[str]:
    return [iteration_name(iteration) for iteration in iterations]


def test_the_newest_goes_first_and_its_manifest_last(site: Site) -> None:
    save(site.folder, [5, 10])
    save(site.folder / "weights", [7])
    site.mirror()
    assert site.names() == [*names_of(5, 10), "weights/iter_0000007"]
    manifests = [name for name in site.puts if name.endswith(MANIFEST)]
    expected = [f"/{name}/{MANIFEST}" for name in (*names_of(10, 5), "weights/iter_0000007")]
    assert [name.removeprefix(str(site.store)[1:]) for name in manifests] == expected
    assert site.puts.index(manifests[0]) == max(n for n, name in enumerate(site.puts) if "iter_0000010" in name)
    assert sorted(read_record(site.folder, str(site.url)).committed) == site.names()
    assert not [name for name in content(site.store) if MARK in name]


@pytest.mark.parametrize("lost", ["nothing", "record", "claim", "manifest"])
def test_a_second_mirror_writes_only_what_is_lost(site: Site, lost: str) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    record = (site.folder / MIRROR).read_bytes()
    places = {
        "record": site.folder / MIRROR,
        "claim": site.store / CLAIM,
        "manifest": site.store / iteration_name(5) / MANIFEST,
    }
    if lost in places:
        places[lost].unlink()
    site.puts.clear()
    passes = site.passes()
    if lost == "manifest":  # what lies there has no mark, as no upload leaves it
        finish(passes)
        assert [*passes.refused] == [iteration_name(5)]
        return
    finish(passes)
    assert site.puts == ([str(site.store / CLAIM)[1:]] if lost == "claim" else [])
    assert site.names() == names_of(5, 10)
    assert (site.folder / MIRROR).read_bytes() == record
    passes._client = None  # type: ignore[assignment]
    assert passes.run()  # without a request


def test_the_store_keeps_its_own_number_of_checkpoints(site: Site) -> None:
    save(site.folder, [5, 10])
    site.mirror(keep=2)
    save(site.folder, [15])
    lose(site.folder, 10)
    passes = site.passes(keep=2)
    assert not passes.run()
    assert committed(site.store) == names_of(5, 10, 15)  # nothing goes in the pass of an upload
    finish(passes)
    assert committed(site.store) == names_of(10, 15)
    assert not (site.store / iteration_name(5)).exists()
    site.puts.clear()
    site.mirror(keep=2)  # 5 is still in the folder, and older than both
    assert site.puts == []
    save(site.folder, [20, 30])
    site.mirror(interval=20)
    assert committed(site.store) == names_of(10, 15, 20)
    site.mirror(interval=20, at_end=True)  # the last goes at any iteration
    assert committed(site.store) == names_of(10, 15, 20, 30)


def test_what_the_run_gives_up_goes_with_its_next_save(site: Site) -> None:
    save(site.folder, [5, 10, 15])
    site.mirror()
    lose(site.folder, 10)  # by retention
    give_up(site.folder, 15)
    site.mirror()
    assert committed(site.store) == names_of(5, 10, 15)  # until a checkpoint says so
    save(site.folder, [7], lineage=ANOTHER_BRANCH, nonce="m")
    site.mirror()
    assert site.names() == names_of(5, 7)
    assert not (site.store / iteration_name(15)).exists()


@pytest.mark.parametrize("is_partial", [False, True])
def test_an_iteration_that_is_saved_again_is_replaced(site: Site, is_partial: bool) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    before = content(site.store)
    if is_partial:  # as an upload leaves it that is killed
        manifest = site.store / iteration_name(10) / MANIFEST
        manifest.rename(manifest.with_name(f"{MARK}of-the-first"))
    give_up(site.folder, 10)
    save(site.folder, [10], lineage=ANOTHER_BRANCH, nonce="m", add=0.5)
    rule = MirrorRule(str(site.url))
    assert rule.unmirrored(site.folder, [5, 10], [5, 10]) == [10]
    site.mirror()
    assert rule.unmirrored(site.folder, [5, 10], [5, 10]) == []
    assert site.names() == names_of(5, 10)
    assert content(site.store) != before


def test_an_upload_goes_on_where_it_was_cut_off(site: Site) -> None:
    save(site.folder, [10], files=4)
    with pytest.raises(OSError, match="fails once"):
        site.passes(fails_at=10).run()
    sent = len([name for name in site.puts if name.endswith(".safetensors")])
    assert committed(site.store) == []
    site.mirror()
    assert site.names() == names_of(10)
    assert 0 < sent < len([name for name in site.puts if name.endswith(".safetensors")]) <= 5


@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_url_has_one_run(site: Site, is_claimed: bool) -> None:
    save(site.folder, [5])
    site.mirror()
    if not is_claimed:  # by an earlier version
        (site.store / CLAIM).unlink()
    before, foreign = content(site.store), site.beside("foreign")
    save(foreign.folder, [15], lineage=Lineage((Branch("other", FRESH),), Parent(RUN.run, 5)))
    with pytest.raises(CheckpointError, match="another run"):
        foreign.mirror(keep=1)
    assert content(site.store) == before
    site.mirror()
    (site.store / CLAIM).write_text("other")  # of a store that ignores the condition of a creation
    save(site.folder, [10])
    with pytest.raises(CheckpointError, match="another run"):
        site.mirror()


def test_what_is_not_of_the_run_is_neither_deleted_nor_replaced(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    save(site.folder, [10])
    site.mirror()
    foreign = site.beside("foreign")
    save(foreign.folder, [5, 15], lineage=Lineage((Branch("other", FRESH),)))
    for name in names_of(5, 15):
        shutil.copytree(foreign.folder / name, site.store / name)  # by hand
    (site.store / iteration_name(1)).mkdir()
    (site.store / iteration_name(1) / "notes").touch()
    before = content(site.store)
    save(site.folder, [15, 20])
    site.mirror(keep=2)
    assert committed(site.store) == names_of(5, 10, 15, 20)
    assert "iter_0000015 was not mirrored" in caplog.text
    assert before.items() <= content(site.store).items()


def test_a_damaged_checkpoint_is_named_and_the_others_go(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    save(site.folder, [5, 10])
    (site.folder / iteration_name(10) / "model-00001-of-00003.safetensors").write_bytes(b"short")
    passes, once = site.passes(), {"keep": 0, "interval": 0, "once": True}
    finish(passes)
    assert [*passes.refused] == [iteration_name(10)]
    assert committed(site.store) == names_of(5)
    assert not (site.store / iteration_name(10)).exists()
    assert "iter_0000010 was not mirrored: A file has the wrong size" in caplog.text
    assert mirror_run(site.folder.parent, str(site.url), **once) == 1
    shutil.rmtree(site.folder / iteration_name(10))
    save(site.folder, [10], nonce="another", add=0.5)
    finish(passes)
    assert passes.refused == {}
    (site.folder / iteration_name(10) / HOST).touch()
    finish(site.passes())  # it is there already
    assert mirror_run(site.folder.parent, str(site.url), **once) == 0
    save(site.folder, [15])
    (site.folder / iteration_name(15) / HOST).touch()
    site.mirror()
    assert "reprise checkpoint gather" in caplog.text
    assert committed(site.store) == names_of(5, 10)


def test_a_checkpoint_replaced_during_its_upload_is_not_mixed(site: Site) -> None:
    save(site.folder, [10], files=4)
    passes = site.passes()
    send = passes._client.put

    def replace(path: Path, source: Path) -> None:
        passes._client.put = send  # type: ignore[method-assign]
        send(path, source)
        give_up(site.folder, 10)
        save(site.folder, [10], files=4, nonce="m", add=0.5)

    passes._client.put = replace  # type: ignore[method-assign]
    finish(passes)
    assert content(site.store / iteration_name(10)) == content(site.folder / iteration_name(10))


def test_a_mirror_that_waits_for_the_lock_of_another_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the mirror of the run before is still ending."""
    monkeypatch.setattr("reprise.stores.mirror._FIRST_PAUSE_S", 0.001)
    site, tries, finishing = Site(tmp_path), list[int](), threading.Event()
    save(site.folder, [5])
    finishing.set()
    other = FolderLock(site.folder / LOCK_FOLDER, "other")
    enter = FolderLock.__enter__

    def count_tries(lock: FolderLock) -> FolderLock:
        tries.append(1)
        if len(tries) == 3:
            other.release()
        return enter(lock)

    with other:
        monkeypatch.setattr(FolderLock, "__enter__", count_tries)
        follow(site.passes(), site.folder, finishing)
    assert len(tries) == 3
    assert site.names() == names_of(5)
    assert caplog.text.count("the mirror is waiting") == 1


def test_an_ended_mirror_leaves_no_process_and_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a request to a store that does not answer."""
    save(tmp_path, [5])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(JOIN_S)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        mirror = Mirror(tmp_path, MirrorRule("s3://bucket/run"))
        connected, _ = silent.accept()
        fork = os.fork()
        if not fork:  # which keeps nothing that the process waits for
            assert mirror.process.stdin is not None
            os._exit(not mirror.process.stdin.closed)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
        with connected:
            assert mirror.finish(0.01) == ["5"]
            assert mirror.process.poll() is not None
            assert not is_locked(tmp_path / LOCK_FOLDER)  # which another host would watch
            with FolderLock(tmp_path / LOCK_FOLDER, "another"):
                pass


@pytest.mark.parametrize("once", [slow(True), False])
def test_an_interrupt_ends_the_command_at_once(tmp_path: Path, once: bool) -> None:
    """In the middle of a request to a store that does not answer."""
    save(tmp_path, [5])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(JOIN_S)
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
        variables = {**os.environ, **keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        call = f"mirror_run(Path({str(tmp_path)!r}), 's3://bucket/run', keep=0, interval=0, once={once})"
        # A shell's background job ignores interrupts, and so do the processes that it starts.
        heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"from pathlib import Path; from reprise.stores import mirror_run; raise SystemExit({call})"
        process = subprocess.Popen([sys.executable, "-c", f"{heeds}; {program}"], env=variables)
        try:
            with silent.accept()[0]:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0  # a request times out later
        finally:
            process.kill()
    assert not is_locked(tmp_path / LOCK_FOLDER)
