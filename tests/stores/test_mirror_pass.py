"""What the passes of a mirror bring into a store, and in which order; a folder stands for the store."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import CheckpointError
from reprise.folder import HOST, MANIFEST, STATE, iteration_name
from reprise.format.lineage import FRESH, Branch, Lineage, Parent
from reprise.format.mirror_record import MIRROR, MirrorRule, read_record
from reprise.stores.client import StoreClient
from reprise.stores.mirror import MirrorOptions, mirror
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.upload import SUPERSEDED, LocalSource, OvertakenError, Upload
from reprise.stores.url import StoreUrl
from tests.stores.saving import RUN, assert_whole, committed, content, give_up, lose, save


class Site:
    """A run's folder and its store.

    Attributes:
        puts: the objects that were written, in order.
    """

    def __init__(self, root: Path) -> None:
        self.folder, self.store = root / "run" / "checkpoints", root / "store"
        self.url = StoreUrl.parse(f"file://{self.store}")
        self.puts: list[str] = []
        self.now = 0.0

    def passes(self, *, keep: int = 0, interval: int = 0, host: int = 0, hosts: int = 1) -> MirrorPass:
        rule = MirrorRule(str(self.url), interval, keep)
        client = InterruptedClient(self.url.root)
        client.puts = self.puts
        return MirrorPass(
            client, self.url, self.folder, rule, host=host, hosts=hosts, stall_s=10.0, clock=lambda: self.now
        )

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


def finish(*mirrors: MirrorPass, at_end: bool = False) -> None:
    """Run mirrors by turns until nothing is left to do."""
    for _ in range(50):
        ends = [passes.run(at_end=at_end) for passes in mirrors]
        if all(ends):
            return
    raise AssertionError("the mirrors do not come to their end")


class InterruptedClient(StoreClient):
    """Notes the objects that it writes, and calls something once, before its request of a number."""

    def __init__(self, root: str, number: int = 0, event: Callable[[], object] = lambda: None) -> None:
        super().__init__(root)
        self.left, self._event = number, event
        self.key = ""  # of the interrupted request
        self.puts: list[str] = []
        for name in ("head", "read", "objects", "put", "create", "put_file", "delete"):
            setattr(self, name, partial(self._request, getattr(super(), name)))

    def _request(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if call.__name__ in ("put", "create"):
            self.puts.append(arguments[0])
        if self.left == 0:
            self.key = f"{call.__name__} {arguments[0]}"
            self._event()
        return call(*arguments)


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
    record = read_record(site.folder, str(site.url))
    assert sorted(record.committed) == site.names()
    assert not record.partial


@pytest.mark.parametrize("lost", [None, "the record", "a manifest"])
def test_a_second_mirror_writes_only_what_is_lost(site: Site, lost: str | None) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    record = (site.folder / MIRROR).read_bytes()
    if lost == "the record":
        (site.folder / MIRROR).unlink()
    elif lost == "a manifest":
        (site.store / iteration_name(5) / MANIFEST).unlink()
    site.puts.clear()
    passes = site.passes()
    finish(passes)
    assert (site.puts == []) == (lost != "a manifest")
    assert site.names() == names_of(5, 10)
    assert (site.folder / MIRROR).read_bytes() == record
    del site.folder, passes._client  # type: ignore[attr-defined]
    assert passes.run()  # without a request


def test_the_store_keeps_its_own_number_of_checkpoints(site: Site) -> None:
    save(site.folder, [5, 10])
    site.mirror(keep=2)
    save(site.folder, [15])
    lose(site.folder, 10)
    site.mirror(keep=2)
    assert committed(site.store) == names_of(10, 15)  # and 5, which is older than both, is not uploaded
    assert not (site.store / iteration_name(5)).exists()
    site.puts.clear()
    site.mirror(keep=2)
    assert site.puts == []


def test_every_nth_checkpoint_goes_and_the_last_at_the_end(site: Site) -> None:
    save(site.folder, [10, 20, 30])
    site.mirror(interval=20)
    assert site.names() == names_of(20)
    site.mirror(interval=20, at_end=True)
    assert site.names() == names_of(20, 30)


@pytest.mark.parametrize("has_new_branch", [False, True], ids=["renamed alone", "and saved again"])
def test_an_iteration_that_the_run_gives_up_is_no_checkpoint(site: Site, has_new_branch: bool) -> None:
    save(site.folder, [5, 10, 15])
    site.mirror()
    lose(site.folder, 10)  # by retention: the store keeps it, until the run gives it up
    give_up(site.folder, 15)
    branch = Lineage((*RUN.branches, Branch("another", 5)))
    if has_new_branch:
        save(site.folder, [7], lineage=branch, nonce="m")
    site.mirror()
    expected = names_of(5, 7) if has_new_branch else names_of(5, 10)
    assert committed(site.store) == expected
    assert (site.store / iteration_name(15) / SUPERSEDED).exists()
    save(site.folder, [20], lineage=branch, nonce="o")
    site.mirror(keep=1)
    assert committed(site.store) == names_of(20)
    assert not (site.store / iteration_name(15)).exists()


@pytest.mark.parametrize("is_partial", [False, True])
def test_an_iteration_that_is_saved_again_is_replaced(site: Site, is_partial: bool) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    before = content(site.store)
    if is_partial:  # as an upload leaves it that is killed
        (site.store / iteration_name(10) / MANIFEST).unlink()
    give_up(site.folder, 10)
    save(site.folder, [10], lineage=Lineage((*RUN.branches, Branch("another", 5))), nonce="m", add=0.5)
    site.mirror()
    assert site.names() == names_of(5, 10)
    assert content(site.store) != before


def test_a_held_checkpoint_is_replaced_once_its_hold_is_gone(site: Site) -> None:
    save(site.folder, [5, 10])
    site.mirror(keep=3)
    held = site.store / iteration_name(5)
    before = content(held)
    (held / "hold").touch()
    lose(site.folder, 5)
    save(site.folder, [5], nonce="m", add=0.5)  # of the same run, as a checkpoint without its optimizer's state
    site.mirror(keep=3)
    assert content(held) == {**before, "hold": b""}
    assert read_record(site.folder, str(site.url)).keep == 3
    passes = site.passes(keep=3)
    assert passes.run(at_end=True)
    assert passes.refused == {iteration_name(5)}
    (held / "hold").unlink()
    finish(passes, at_end=True)
    assert passes.refused == frozenset()
    assert content(held) == content(site.folder / iteration_name(5)) != before


def test_an_upload_goes_on_where_it_was_cut_off(site: Site) -> None:
    save(site.folder, [10], files=4)
    passes, files = site.passes(), ".safetensors"
    put_file = passes._client.put_file  # type: ignore[attr-defined]

    def put_two(key: str, path: Path) -> str | None:
        if len([name for name in site.puts if name.endswith(files)]) == 2:
            raise OSError(5, "cut off", key)
        result: str | None = put_file(key, path)
        return result

    passes._client.put_file = put_two  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="cut off"):
        passes.run()
    assert committed(site.store) == []
    site.mirror()
    assert site.names() == names_of(10)
    assert len([name for name in site.puts if name.endswith(files)]) == 4


@pytest.mark.parametrize("is_known", [True, False], ids=["another", "unknown"])
def test_the_checkpoints_of_another_run_are_refused_by_name(site: Site, is_known: bool) -> None:
    save(site.folder, [5])
    site.mirror()
    before, foreign = content(site.store), site.beside("foreign")
    save(foreign.folder, [5], lineage=Lineage((Branch("other", FRESH),)))
    if not is_known:
        state = foreign.folder / iteration_name(5) / STATE
        state.write_text(state.read_text().replace('"run"', '"no_run"'))
    with pytest.raises(CheckpointError, match="another run"):
        foreign.mirror(keep=1)
    assert content(site.store) == before


def test_what_a_run_began_with_is_neither_deleted_nor_replaced(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    before, successor = content(site.store), site.beside("successor")
    child = Lineage((Branch("child", FRESH),), Parent(RUN.run, 10))
    save(successor.folder, [15, 20], lineage=child)
    successor.mirror(keep=1)
    assert committed(site.store) == names_of(5, 10, 20)
    assert before.items() <= content(site.store).items()
    save(successor.folder, [10], lineage=child, add=0.5)
    successor.mirror()
    assert "iter_0000010 is not mirrored" in caplog.text
    assert before.items() <= content(site.store).items()


def test_a_damaged_checkpoint_is_named_and_the_others_go(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    save(site.folder, [5, 10])
    file = site.folder / iteration_name(10) / "model-00001-of-00003.safetensors"
    file.write_bytes(b"short")
    passes, options = site.passes(), MirrorOptions(site.folder, str(site.url), once=True)
    finish(passes)
    assert passes.refused == {iteration_name(10)}
    assert committed(site.store) == names_of(5)
    assert "iter_0000010 is not mirrored: A file has the wrong size" in caplog.text
    assert not (site.folder / iteration_name(5) / HOST).exists()
    assert mirror(options) == 1
    shutil.rmtree(site.folder / iteration_name(10))
    save(site.folder, [10], nonce="another", add=0.5)
    finish(passes)
    assert passes.refused == frozenset()
    assert mirror(options) == 0
    assert site.names() == names_of(5, 10)


def test_hosts_upload_together_and_the_first_commits(site: Site) -> None:
    save(site.folder, [10], files=8)
    hosts = [site.passes(host=host, hosts=3) for host in range(3)]
    assert not hosts[1].run()  # the first has not begun
    assert committed(site.store) == []
    assert site.puts == []
    assert not hosts[0].run()
    share = len([name for name in site.puts if name.endswith(".safetensors")])
    assert share in (2, 3)
    for host in (1, 2, 0):
        hosts[host].run()
    assert site.names() == names_of(10)
    uploaded = [name for name in site.puts if name.endswith(".safetensors")]
    assert len(uploaded) == len(set(uploaded)) == 8
    assert all(passes.run() for passes in hosts)


def test_the_first_host_takes_over_from_one_that_is_gone(site: Site) -> None:
    save(site.folder, [10], files=8)
    first = site.passes(hosts=2)
    assert not first.run()
    site.now = 9.0
    assert not first.run()
    assert committed(site.store) == []
    site.now = 30.0
    first.run()
    assert site.names() == names_of(10)


def test_the_rule_and_the_record_fit(site: Site) -> None:
    save(site.folder, [5, 10, 15])
    rule = MirrorRule(str(site.url))
    assert rule.unmirrored(site.folder, [5, 10, 15], [5, 10]) == [5, 10]
    assert replace(rule, keep=1).unmirrored(site.folder, [5, 10, 15], [5, 10]) == []
    site.mirror()
    assert rule.unmirrored(site.folder, [5, 10, 15], [5, 10]) == []
    give_up(site.folder, 10)
    save(site.folder, [10], nonce="m", add=0.5)
    assert rule.unmirrored(site.folder, [5, 10, 15], [5, 10]) == [10]


@pytest.mark.parametrize("is_overtaken", [False, True], ids=["one after the other", "amid a commit"])
def test_two_live_runs_never_mix_and_one_is_refused(
    site: Site, caplog: pytest.LogCaptureFixture, is_overtaken: bool
) -> None:
    save(site.folder, [5])
    twin = site.beside("twin")
    shutil.copytree(site.folder, twin.folder)
    first, second = site.passes(), twin.passes()
    finish(first)
    finish(second)
    save(site.folder, [10])
    save(twin.folder, [10], nonce="m", add=7)
    commit, steps = Upload.commit, [lambda: finish(second)] if is_overtaken else []

    def overtaken(upload: Upload) -> None:
        """Let the second run upload all of its checkpoint just before the first commits."""
        if steps:
            steps.pop()()
        commit(upload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "commit", overtaken)
        finish(first)
    finish(second)
    stored = content(site.store / iteration_name(10))
    assert stored == content((twin if is_overtaken else site).folder / iteration_name(10))
    assert ("Another upload has begun" if is_overtaken else "Another run uploads") in caplog.text
    lose(site.folder, 10)
    finish(first, at_end=True)
    assert content(site.store / iteration_name(10)) == stored


def _replace_after_an_upload(site: Site, iteration: int) -> dict[str, bytes]:
    """Begin anew: mirror a run, save an iteration again in its folder; return that of the store."""
    for folder in (site.store, site.folder.parent):
        shutil.rmtree(folder, ignore_errors=True)
    save(site.folder, [iteration, iteration + 5])
    site.mirror()
    lose(site.folder, iteration)
    save(site.folder, [iteration], nonce="m", add=0.5)
    return content(site.store / iteration_name(iteration))


Interrupted = tuple[dict[str, bytes], MirrorPass, InterruptedClient]


def _each_request(site: Site, event: Callable[[dict[str, bytes]], object]) -> Iterator[Interrupted]:
    """Yield what a store has, and a mirror that is to replace it, whose n-th request comes after an event."""
    for number in range(1, 50):
        before = _replace_after_an_upload(site, 5)
        passes = site.passes()
        client = passes._client = InterruptedClient(site.url.root, number, partial(event, before))
        yield before, passes, client
        if client.left > 0:
            assert number > 10
            return
    raise AssertionError("the mirror does not come to its end")


def test_a_hold_that_finds_its_checkpoint_keeps_it(site: Site) -> None:
    held, found = site.store / iteration_name(5), list[bool]()

    def hold(before: dict[str, bytes]) -> None:
        held.mkdir(exist_ok=True)
        (held / "hold").touch()
        found.append((held / MANIFEST).exists() and (held / MANIFEST).read_bytes() == before[MANIFEST])

    for before, passes, client in _each_request(site, hold):
        finish(passes)
        if client.left <= 0 and found[-1]:
            assert content(held) == {**before, "hold": b""}, client.key
    assert {*found} == {True, False}


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_uploads_that_interleave_leave_a_whole_one_or_none(site: Site, *, is_late: bool) -> None:
    twin, name = site.folder.parents[1] / "twin", iteration_name(10)
    save(site.folder, [10], files=1)
    save(twin, [10], files=1, nonce="m", add=7)
    sources, place = [LocalSource(folder / name) for folder in (site.folder, twin)], site.url.child(name)
    outcomes = set()
    for number in range(1, 50):
        shutil.rmtree(site.store, ignore_errors=True)
        rival = Upload(StoreClient(site.url.root), place, sources[1], sources[1].files)
        steps = [rival.begin, rival.send, rival.commit]

        def interrupt(steps: list[Callable[[], object]] = steps) -> None:
            with contextlib.suppress(OvertakenError, OSError):
                for step in list(steps[: 1 if is_late else 3]):
                    steps.remove(step)
                    step()

        client = InterruptedClient(site.url.root, number, interrupt)
        upload = Upload(client, place, sources[0], sources[0].files)
        with contextlib.suppress(OvertakenError, OSError):
            for step in (upload.begin, upload.send, upload.commit):
                step()
        if client.left > 0:
            break
        with contextlib.suppress(OvertakenError, OSError):
            for step in steps[: 2 if is_late else 0]:
                step()
        stored = content(site.store / name)
        # The file whose write is under way may arrive after the rival's commit.
        is_file = client.key.startswith("put") and not client.key.endswith((".claim", sources[0].files.digest))
        if MANIFEST in stored and (is_late or not is_file):
            files = {file: data for file, data in stored.items() if not file.startswith(".upload-")}
            outcomes.add([content(folder / name) for folder in (site.folder, twin)].index(files))
    assert number > 8
    assert outcomes == {0, 1}


def _fail(*_: object) -> None:
    raise OSError(errno.EIO, "the store fails once")


def test_a_replacement_that_ends_early_leaves_one_or_none(site: Site) -> None:
    stored, outcomes = site.store / iteration_name(5), set[str]()
    for before, passes, client in _each_request(site, _fail):
        after = content(site.folder / iteration_name(5))
        with contextlib.suppress(OSError):
            finish(passes)
        manifest = stored / MANIFEST
        expected = (before, after)[manifest.read_bytes() == after[MANIFEST]] if manifest.exists() else {}
        lose(site.folder, 5)
        finish(passes)
        record = read_record(site.folder, str(site.url))
        assert (content(stored) if stored.exists() else {}) == expected, client.key
        assert not record.partial
        assert (iteration_name(5) in record.committed) == bool(expected), client.key
        outcomes.add("none" if not expected else "old" if expected == before else "new")
    assert outcomes == {"none", "old", "new"}


@pytest.mark.slow
def test_a_request_that_fails_only_delays_a_replacement(site: Site) -> None:
    for _, passes, client in _each_request(site, _fail):
        with contextlib.suppress(OSError):
            finish(passes)
        finish(passes)
        assert content(site.store / iteration_name(5)) == content(site.folder / iteration_name(5)), client.key


def test_a_hold_after_a_failed_deletion_counts(site: Site) -> None:
    save(site.folder, [5])
    site.mirror(keep=1)
    save(site.folder, [10])
    passes = site.passes(keep=1)
    assert not passes.run()  # the newest goes first
    passes._client.delete = lambda _: _fail()  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="fails once"):
        passes.run()
    del passes._client.delete  # type: ignore[attr-defined]
    (site.store / iteration_name(5) / "hold").touch()
    assert passes.run()
    assert committed(site.store) == names_of(5, 10)
    (site.store / iteration_name(5) / "hold").unlink()
    assert passes.run()
    assert committed(site.store) == names_of(10)
