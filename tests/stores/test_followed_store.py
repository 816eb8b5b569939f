"""`reprise follow URL`: one line for each checkpoint of a mirrored run.

A folder stands for the store. No test waits for time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from reprise import prune
from reprise.format import STILL_MIRRORED
from reprise.format.lineage import Branch, Lineage
from reprise.stores import location
from reprise.stores.store import CHILD
from tests.stores.saving import RUN, committed, content, give_up, save
from tests.stores.test_mirror_pass import Site, finish, names_of
from trainer.commands.follow import main
from trainer.follow.follower import Follower
from trainer.follow.runner import CommandOutcome


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Yield a run of one checkpoint, in its store."""
    site = Site(tmp_path)
    save(site.folder, [5])
    site.mirror()
    yield site
    CHILD.end()


def add(site: Site, *iterations: int) -> None:
    save(site.folder, iterations)
    site.mirror()


class Runner:
    """Calls an event at each pause, or during each command; interrupts when nothing is left."""

    def __init__(self, *events: Callable[[], object], during: Callable[[], object] = lambda: None) -> None:
        self._events, self._during = list(events), during
        self.urls: list[str] = []

    def run(self, command: Sequence[str]) -> CommandOutcome:
        self.urls.append(command[-1])
        self._during()
        return CommandOutcome(0, 1.0, {"loss": 2.0})

    def pause(self, seconds: float) -> None:
        if self._events:
            self._events.pop(0)()
        else:
            raise KeyboardInterrupt


def follow(site: Site, runner: Runner, *, once: bool = False) -> list[int]:
    """Follow the URL of a run; return the iterations with a line."""
    follower = Follower(location(str(site.url)), ["evaluate", "{}"])
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.chdir(site.folder.parent)
        patch.setattr("trainer.follow.follower.run_command", runner.run)
        patch.setattr("trainer.follow.follower.sleep", runner.pause)
        assert follower.follow(once=once)
    record = site.folder.parent / "follow.jsonl"
    return [json.loads(line)["iteration"] for line in record.read_text().splitlines()]


def test_each_checkpoint_of_a_url_has_one_line(site: Site) -> None:
    add(site, 10)
    first = Runner(lambda: None, lambda: add(site, 15))
    assert follow(site, first) == [5, 10, 15]
    assert first.urls == [f"{site.url}/{name}" for name in names_of(5, 10, 15)]
    assert follow(site, Runner(), once=True) == [5, 10, 15]
    for iteration in (10, 15):  # saved again after a rewind
        give_up(site.folder, iteration)
    save(site.folder, [10], lineage=Lineage((*RUN.branches, Branch("another", 5))), add=0.5)
    site.mirror()
    assert follow(site, Runner(), once=True) == [5, 10, 15, 10]


def test_a_result_of_a_deleted_checkpoint_is_dropped(site: Site) -> None:
    seen = []

    def retain() -> None:
        if not seen:
            add(site, 10)
            assert prune(str(site.url), keep=1, dry_run=True).retained == (10,)
            assert prune(str(site.url), keep=1).retained == (10,)
        seen.append(committed(site.store))

    assert follow(site, Runner(during=retain), once=True) == [10]
    assert seen == [names_of(10), names_of(10)]
    assert content(site.store / names_of(10)[0]) == content(site.folder / names_of(10)[0])
    assert not (site.store / names_of(5)[0]).exists()


def test_a_follower_waits_for_what_is_still_to_come(site: Site) -> None:
    save(site.folder, [10, 15])
    passes, marker = site.passes(), site.store / STILL_MIRRORED
    assert not passes.run()  # the newest goes first
    assert marker.exists()
    (site.folder / "lock").write_text("of a run that trains")
    finish(passes)
    assert marker.exists()
    os.truncate(site.folder / "lock", 0)
    finish(passes)
    assert not marker.exists()
    assert follow(site, Runner(), once=True) == [5, 10, 15]


def test_the_record_of_a_url_lies_beside_the_caller(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    command = [sys.executable, "-S", "-c", "import sys; print(sys.argv[1])", "{}"]
    assert main([str(site.url), "--once", "--", *command]) == 0
    assert f"{site.url}/{names_of(5)[0]}" in capsys.readouterr().out
    assert [json.loads(line)["iteration"] for line in Path("follow.jsonl").read_text().splitlines()] == [5]
    assert main([f"{site.url}-elsewhere", "--once", "--", *command]) == 2


def test_a_store_that_is_away_for_a_while_is_waited_for(site: Site) -> None:
    away = site.store.with_name("away")
    site.store.rename(away)
    site.store.symlink_to(site.store)  # an error of the store, and not a missing object

    def mend() -> None:
        site.store.unlink()
        away.rename(site.store)

    assert follow(site, Runner(mend, lambda: None)) == [5]
