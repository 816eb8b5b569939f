"""A tracker has each iteration of a run once, whatever is killed, sent back, moved, or cannot be reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.errors import LockError, TrainerError
from tests.messages import refused
from tests.published_runs import LoggedRun, MemoryTracker, losses, publish, publisher
from trainer.config.compose import CommandLine, resolve
from trainer.publish.tracker import row_of


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    """Return a run that has just started."""
    started = LoggedRun(tmp_path / "run")
    started.start(0)
    return started


@pytest.fixture
def tracker() -> MemoryTracker:
    return MemoryTracker()


def test_each_line_is_sent_once_with_its_bits(run: LoggedRun, tracker: MemoryTracker) -> None:
    run.train(1, 25)
    publish(run.folder, tracker)
    publish(run.folder, tracker)
    run.train(26, 30)
    publish(run.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 30)
    events = [(row.iteration, list(row.figures), dict(row.texts)) for row in tracker.rows["a1b2c3"]]
    assert [event[0] for event in events if event[1] == ["valid/loss"]] == [10, 20, 30]
    assert [event[2] for event in events if event[2]] == [{"spike/figure": "loss of 20"}]
    assert tracker.configs["a1b2c3"]["train.seed"] == 7


def test_a_kill_a_resume_and_a_move_leave_one_run(run: LoggedRun, tracker: MemoryTracker, tmp_path: Path) -> None:
    run.train(1, 25)
    publish(run.folder, tracker)
    run.train(26, 28)  # which no publisher sees before the kill
    run.kill()
    run.start(20)
    publish(run.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 25)
    run.train(21, 22)
    publish(run.folder, tracker)
    run.kill()
    moved = LoggedRun(tmp_path / "elsewhere/moved")
    moved.folder.parent.mkdir()
    shutil.move(run.folder, moved.folder)
    moved.start(20)
    moved.train(21, 40)
    publish(moved.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 40)
    assert list(tracker.rows) == ["a1b2c3"]


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_branch_becomes_a_linked_run_with_all_iterations(
    run: LoggedRun, tracker: MemoryTracker, is_followed: bool
) -> None:
    run.train(1, 25)
    if is_followed:
        publish(run.folder, tracker)
    run.start(12, branch_id="b0")
    run.train(13, 13, branch=1)
    if is_followed:
        publish(run.folder, tracker)
    run.train(14, 30, branch=1)
    publish(run.folder, tracker)
    assert ("a1b2c3" in tracker.rows) == is_followed
    assert not is_followed or tracker.losses("a1b2c3") == losses(1, 25)
    assert tracker.losses("a1b2c3-1") == losses(1, 12) | losses(13, 30, branch=1)
    config = tracker.configs["a1b2c3-1"]
    assert (config["reprise.forked_from"], config["reprise.forked_at"]) == ("a1b2c3", 12)
    publish(run.folder, tracker)
    assert tracker.opened[-1] == "a1b2c3-1"


def test_a_publisher_that_follows_sees_the_cut_of_the_log(run: LoggedRun, tracker: MemoryTracker) -> None:
    follower = publisher(run.folder, tracker)

    def look() -> None:
        follower.send()

    look()
    run.train(1, 25, branch=3)
    look()
    run.kill()
    run.start(20)
    look()
    run.train(21, 27)  # shorter lines
    look()
    assert tracker.losses("a1b2c3") == losses(1, 25, branch=3) | losses(26, 27)
    line = json.dumps({"iteration": 27, "event": "save", "seconds": 0.5}) + "\n"
    for part in (line[:9], line[9:]):
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(part)
        look()
    assert tracker.rows["a1b2c3"][-1].figures == {"save/seconds": 0.5}
    run.start(3, branch_id="b1")
    look()
    run.train(4, 9, branch=1)
    look()
    run.train(10, 12, branch=1)
    look()
    assert tracker.losses("a1b2c3-1") == losses(1, 3, branch=3) | losses(4, 12, branch=1)
    follower.close()


def test_an_outage_loses_nothing_and_doubles_nothing(run: LoggedRun, tracker: MemoryTracker) -> None:
    run.train(1, 15)
    publish(run.folder, tracker)
    tracker.fails = True
    run.train(16, 3700)
    with pytest.raises(ConnectionRefusedError):
        publish(run.folder, tracker)
    tracker.fails, tracker.keeps = False, 321  # and a connection that breaks in the middle
    for _ in range(3):
        with pytest.raises(ConnectionResetError):
            publish(run.folder, tracker)
    tracker.keeps = None
    publish(run.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 3700)


def test_one_process_publishes_a_run_to_a_tracker(run: LoggedRun) -> None:
    first = publisher(run.folder, MemoryTracker())
    with refused(LockError, str(run.folder)):
        publisher(run.folder, MemoryTracker())
    first.close()
    publisher(run.folder, MemoryTracker()).close()


def test_values_of_the_environment_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_NAME", "the-secret")
    command = CommandLine(("run.name=${oc.env:SECRET_NAME}", "data.path=x", "train.seed=7"))
    run, tracker = LoggedRun(tmp_path / "run"), MemoryTracker()
    run.start(0, config=resolve(command.compose()).text)
    run.train(1, 3)
    publish(run.folder, tracker)
    config = tracker.configs["a1b2c3"]
    assert "the-secret" in (run.folder / "config.yaml").read_text()
    assert "the-secret" not in str(config)
    assert config.keys() & {"run.name", "run.dir", "checkpoint.save", "data.path", "train.seed"} == {
        "data.path",
        "train.seed",
    }


@pytest.mark.parametrize("cursor", ['{"lines": [', '{"ids": "a"}'])
def test_a_damaged_cursor_is_named(run: LoggedRun, tracker: MemoryTracker, cursor: str) -> None:
    run.train(1, 3)
    publish(run.folder, tracker)
    (run.folder / "publish/memory/cursor-0.json").write_text(cursor)
    with refused(TrainerError, "cursor-0.json"):
        publish(run.folder, tracker)


def test_a_cursor_that_is_not_stored_loses_no_line(
    run: LoggedRun, tracker: MemoryTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed after it has sent lines sends them again, under their numbers."""
    run.train(1, 15)
    sender = publisher(run.folder, tracker)
    with monkeypatch.context() as patch:
        patch.setattr(sender, "_store", lambda _: None)
        sender.send()
        sender.close()
    run.train(16, 18)
    publish(run.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 18)


def test_lines_that_a_tracker_had_in_memory_alone_come_again(run: LoggedRun, tracker: MemoryTracker) -> None:
    tracker.is_durable = False
    run.train(1, 15)
    sender = publisher(run.folder, tracker)
    sender.send()
    sender.close()  # without the end of the remote run
    tracker.rows.clear()
    publish(run.folder, tracker)
    assert tracker.losses("a1b2c3") == losses(1, 15)
    tracker.rows.clear()
    publish(run.folder, tracker)
    assert tracker.rows == {}


def test_a_save_that_ends_late_is_sent(run: LoggedRun, tracker: MemoryTracker) -> None:
    """Its line comes after lines of later iterations, also where a kill and a resume come in between."""
    run.train(1, 22)
    publish(run.folder, tracker)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 20, "event": "save", "seconds": 0.5}) + "\n")
    run.kill()
    run.start(20)
    run.train(21, 24)
    publish(run.folder, tracker)
    assert [row.iteration for row in tracker.rows["a1b2c3"] if "save/seconds" in row.figures] == [20]
    assert tracker.losses("a1b2c3") == losses(1, 24)


def test_a_run_without_an_id_keeps_its_remote_run(run: LoggedRun, tracker: MemoryTracker) -> None:
    (run.folder / "run.json").unlink()
    run.train(1, 5)
    follower = publisher(run.folder, tracker)
    tracker.fails = True
    with pytest.raises(ConnectionError):
        follower.send()
    tracker.fails = False
    follower.reopen()
    follower.send()
    follower.finish()
    follower.close()
    publish(run.folder, tracker)
    assert [tracker.losses(remote) for remote in tracker.rows] == [losses(1, 5)]


def test_values_that_are_none_are_left_out() -> None:
    members = {
        "loss": 1.5,
        "norm_hex": "zz",
        "lr": 10**400,
        "time": "x",
        "skipped": True,
        "start": {"data": 2.0},
    }
    row = row_of(0, {"iteration": 7, **members})
    assert (row.time, dict(row.figures)) == (0.007, {"train/loss": 1.5, "train/skipped": 1})
