"""The mirrors of two hosts without a common folder: what they bring into a store together."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from reprise.format.lineage import FRESH, LINEAGE, Branch, Lineage
from reprise.format.mirror_record import MIRROR, MirroredCheckpoint, read_record
from reprise.storage.folder import iteration_name
from reprise.storage.lock import Holder
from reprise.stores import mirror as stores_mirror
from reprise.stores import mirror_process
from reprise.stores.client import StoreClient
from reprise.stores.mirror import MirrorOptions, mirror
from reprise.stores.mirror_process import MirrorProcess, mirror_rule
from reprise.stores.peers import Peers, listen
from tests.local_folders import save_on_two_hosts
from tests.stores.test_killed import KillableClient, KilledError, Killer
from tests.unit.reprise.local.sites import Site, close, sums


@pytest.mark.parametrize("copies", [0, 1])
def test_the_store_has_the_files_of_a_shared_save(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack, copies: int
) -> None:
    site = Site(saved_hosts / f"copies{copies}", tmp_path, stack)
    site.run()
    assert site.committed() == [iteration_name(1), iteration_name(2)]
    for name in site.committed():
        assert sums(site.store / name) == sums(saved_hosts / "shared" / name)


@pytest.mark.parametrize("keep", [0, 1])
def test_host_0_keeps_to_its_choice_and_one_checkpoint_is_held(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack, keep: int
) -> None:
    site = Site(saved_hosts / "copies0", tmp_path, stack, keep=keep)
    newest = [folder / iteration_name(2) for folder in site.folders]
    aside = [folder.rename(folder.with_name("aside")) for folder in newest]
    assert not site.passes[0].run()
    assert site.held() == [iteration_name(1)] * 2
    for path, folder in zip(aside, newest, strict=True):
        path.rename(folder)  # the run commits another
    assert not site.passes[0].run()
    assert site.held() == [iteration_name(1)] * 2
    site.passes[1].run()
    site.passes[0].run()
    assert site.committed() == [iteration_name(1)]
    site.run()
    assert site.committed() == [iteration_name(1), iteration_name(2)][-keep:]
    assert site.held() == []


def test_lost_pieces_are_named_by_their_host_and_others_go_on(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(saved_hosts / "copies0", tmp_path, stack)
    shutil.rmtree(site.folders[1] / iteration_name(2))
    for _ in range(4):
        assert not site.passes[0].run()
        site.passes[1].run()
    assert site.committed() == [iteration_name(1)]
    site.now = 31.0
    site.run()
    assert site.committed() == [iteration_name(1)]
    assert f"{iteration_name(2)} is not mirrored" in caplog.text
    assert "3 of 3 pieces of host" in caplog.text


def test_host_0_takes_over_with_the_copies(saved_hosts: Path, tmp_path: Path, stack: ExitStack) -> None:
    site = Site(saved_hosts / "copies1", tmp_path, stack)
    close(site.listeners[1])  # the other mirror does not answer
    assert not site.passes[0].run()
    site.now = 9.0
    assert not site.passes[0].run()
    assert site.committed() == []
    site.now = 30.0
    site.passes[0].run()
    assert site.committed() == [iteration_name(2)]
    assert sums(site.store / iteration_name(2)) == sums(saved_hosts / "shared" / iteration_name(2))


def test_a_record_of_an_earlier_host_0_takes_nothing_back(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    earlier = Lineage((Branch("run", FRESH),))
    later = Lineage((*earlier.branches, Branch("later", 1)))
    save_on_two_hosts(tmp_path / "saved", 2, 3, members={LINEAGE: later.record()})
    site = Site(tmp_path / "saved", tmp_path, stack)
    site.run()
    for folder in site.folders:
        shutil.rmtree(folder / iteration_name(2))  # as retention does
    record = read_record(site.folders[0], str(site.url))
    given_up = {**record.committed, iteration_name(2): MirroredCheckpoint("of the branch before", earlier)}
    (site.folders[0] / MIRROR).write_bytes(replace(record, committed=given_up).to_bytes())
    site.restart(0)
    site.run()
    assert site.committed() == [iteration_name(2), iteration_name(3)]


def test_a_lock_under_an_earlier_name_of_the_host_is_no_bar(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_mirror, "POLL_S", 0.0)
    site = Site(saved_hosts / "copies1", tmp_path, stack, hosts=(0,))
    (site.folders[0] / ".mirror").mkdir()
    (site.folders[0] / ".mirror" / "lock").write_text(json.dumps(asdict(Holder("before", 1, "a nonce", 0.0))))
    options = MirrorOptions(site.folders[0], str(site.url), once=True)
    assert mirror(options, pool_of=lambda _: site.pools[0]) == 0
    assert site.committed() == [iteration_name(1), iteration_name(2)]


def test_a_host_that_mirrors_its_folder_alone_is_told_of_gather(
    saved_hosts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved_hosts / "copies0" / "host0" / "local", tmp_path / "local")
    options = MirrorOptions(tmp_path / "local", f"file://{tmp_path / 'store'}", once=True)
    assert mirror(options) == 1
    assert f"{iteration_name(2)} is not mirrored" in caplog.text
    assert "reprise checkpoint gather" in caplog.text
    assert not list(tmp_path.glob("store/iter_*"))


@pytest.mark.slow
def test_a_killed_mirror_is_started_again_at_its_port(
    saved_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mirror_process, "_RESTART_S", 0.0)
    shutil.copytree(saved_hosts / "copies0", tmp_path / "hosts")
    rule, store = mirror_rule(f"file://{tmp_path / 'store'}", interval=0, keep=0), tmp_path / "store"
    listeners = [listen() for _ in range(2)]
    addresses = tuple(("127.0.0.1", listener.getsockname()[1]) for listener in listeners)
    processes = [
        MirrorProcess(
            tmp_path / "hosts" / f"host{host}" / "local",
            rule,
            host=host,
            hosts=2,
            peers=Peers(listener, addresses, "a token"),
        )
        for host, listener in enumerate(listeners)
    ]
    processes[1]._process.kill()
    processes[1]._process.wait(60.0)
    processes[1].wake()
    assert [process.finish(120.0) for process in processes] == [True, True], capfd.readouterr().err
    assert processes[0].missing() == []
    for iteration in (1, 2):
        assert sums(store / iteration_name(iteration)) == sums(saved_hosts / "shared" / iteration_name(iteration))


def test_an_older_one_that_all_have_is_chosen_before_a_newer_one(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack
) -> None:
    site = Site(saved_hosts / "copies0", tmp_path, stack)
    newest = site.folders[1] / iteration_name(2)
    aside = newest.rename(newest.with_name("aside"))  # the second host has not named it yet
    site.passes[0].run()
    assert site.held() == [iteration_name(1)] * 2
    aside.rename(newest)
    site.run()
    assert site.committed() == [iteration_name(1), iteration_name(2)]


def test_a_follower_waits_until_host_0_is_through(saved_hosts: Path, tmp_path: Path, stack: ExitStack) -> None:
    site = Site(saved_hosts / "copies0", tmp_path, stack, hosts=(0, 1, 1))
    site.run()
    assert not site.passes[1].run(at_end=True)
    assert site.passes[0].run(at_end=True)
    site.pools[0].end()
    for host in (1, 2):  # the end of a follower is its own alone
        assert site.passes[host].run(at_end=True), host
        site.pools[host].end()


def test_a_host_that_does_not_answer_is_awaited(saved_hosts: Path, tmp_path: Path, stack: ExitStack) -> None:
    site = Site(saved_hosts / "copies0", tmp_path, stack)
    close(site.listeners[1])
    with pytest.raises(ConnectionRefusedError, match=str(site.addresses[1][1])):
        site.passes[0].run()
    site.restart(1)
    while iteration_name(1) not in site.committed():
        site.passes[0].run()
        site.passes[1].run()
    answer = site.servers[1]._answer
    site.servers[1]._answer = lambda request: answer({**request, "order": "?"})  # type: ignore[method-assign]
    assert site.passes[0].run()
    assert site.held() == [iteration_name(1)]  # and is released later
    del site.servers[1]._answer  # type: ignore[method-assign]
    assert site.passes[0].run()
    assert site.held() == []


@pytest.mark.parametrize(
    ("victim", "step"), [(1, 9), *(pytest.param(host, 1, marks=pytest.mark.slow) for host in (0, 1))]
)
def test_a_mirror_may_end_at_any_call(saved_hosts: Path, tmp_path: Path, victim: int, step: int) -> None:
    """Start a mirror again that is killed at a call: the store has whole checkpoints alone, and in the end all."""
    for number in itertools.count(1, step):
        root, killer, is_killed = tmp_path / str(number), Killer(number, is_after=bool(number % 2)), False

        def client(url: str, host: int, killer: Killer = killer) -> StoreClient:
            return KillableClient(url, killer) if host == victim else StoreClient(url)

        with ExitStack() as stack:
            site, is_done = Site(saved_hosts / "copies0", root, stack, client=client), False
            while not is_done:
                for host in range(2):
                    try:
                        is_done = site.passes[host].run() or (is_done and host == 1)
                    except KilledError:
                        is_killed, is_done = True, False
                        site.restart(host)
                    for name in site.committed():
                        files = {file: digest for file, digest in sums(site.store / name).items() if file[0] != "."}
                        assert files == sums(saved_hosts / "shared" / name)
            assert site.committed() == [iteration_name(1), iteration_name(2)], number
            assert not list(site.store.glob("*/.upload-*")), number
        shutil.rmtree(root)
        if not is_killed:
            break
    assert number > 10
