"""`reprise follow`: which checkpoints have a line, exactly once, and what ends a follower. No test waits for time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

import reprise
from reprise.errors import DataError, LockError
from reprise.storage import CheckpointFolder, Files, FolderLock, Hold, Json
from reprise.stores import ManifestVersion, manifest_version
from tests.messages import Printed, refused
from tests.unit.reprise.management.test_listing import save
from tests.unit.reprise.management.test_pruning import full_run
from trainer.commands.follow import main
from trainer.follow.follower import Follower
from trainer.follow.runner import CommandOutcome, number_at

TEXT = """
import sys
for line in ("text", '{"a": {"b": 1}}', '{"a": {"b": 2.5}}', "{torn", "[3]", sys.argv[1]):
    print(line)
sys.exit(4 * sys.argv[1].endswith("2"))
"""
ECHO = [sys.executable, "-S", "-c", TEXT, "{}"]


class FakeRunner:
    """Counts time, and calls what is to happen at each pause and during each command, then interrupts."""

    def __init__(
        self, *events: Callable[[], object], during: Callable[[Path], CommandOutcome | None] = lambda path: None
    ) -> None:
        self._events, self._during = list(events), during
        self.now, self.is_stopped = 0.0, False
        self.folders: list[str] = []

    def run(self, command: Sequence[str]) -> CommandOutcome:
        self.folders.append(Path(command[-1]).name)
        assert list(Path(command[-1]).glob("hold.*"))
        return self._during(Path(command[-1])) or CommandOutcome(0, 1.5, {"loss": 2.0, "n": len(self.folders)})

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self._events:
            self._events.pop(0)()
        else:
            self.is_stopped = True
            raise KeyboardInterrupt


def run_follower(
    run: Path, runner: FakeRunner, *, once: bool = False, metric: str | None = None, weights: bool = False
) -> bool:
    """Return whether all went well, also if the runner interrupts the follower."""
    command = ["evaluate", "{}"]
    follower = Follower(run, command, weights=weights, metric=metric)
    with contextlib.suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.follow.follower.run_command", runner.run)
        patch.setattr("trainer.follow.follower.sleep", runner.pause)
        return follower.follow(once=once, poll_s=3)
    return True


def lines(run: Path, name: str = "follow.jsonl") -> list[Json]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def iterations(run: Path) -> list[int]:
    return [line["iteration"] for line in lines(run)]


def test_each_checkpoint_has_one_line_as_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    runner = FakeRunner(lambda: None, lambda: save(folder, 2), lambda: None, lambda: save(folder, 3, 4))
    assert run_follower(tmp_path, runner)
    assert iterations(tmp_path) == [1, 2, 3, 4]
    assert runner.folders == [f"iter_000000{n}" for n in (1, 2, 3, 4)]
    assert runner.now == 15.0
    first = lines(tmp_path)[0]
    assert first["command"] == ["evaluate", str(folder / "iter_0000001")]
    assert (first["checkpoint"], first["status"], first["seconds"]) == ("iter_0000001", 0, 1.5)
    assert (first["result"], first["branch"], first["branches"]) == ({"loss": 2.0, "n": 1}, None, [])
    assert not list(folder.rglob("hold*"))


class KilledError(BaseException):
    """Stands for a kill of the follower."""


def test_a_follower_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    def die(path: Path) -> CommandOutcome:
        raise KilledError

    save(tmp_path, 1)
    with pytest.raises(KilledError):
        run_follower(tmp_path, FakeRunner(during=die))
    for expected in ([1], [1, 2], [1, 2, 2]):
        if len(expected) > 1:
            save(tmp_path, 2)  # the second time another checkpoint
        runner = FakeRunner()
        assert run_follower(tmp_path, runner, once=True)
        assert (iterations(tmp_path), len(runner.folders), runner.now) == (expected, 1, 0.0)
    assert len({line["digest"] for line in lines(tmp_path)}) == 3


def test_a_torn_last_line_is_cut_and_no_other(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    run_follower(tmp_path, FakeRunner(), once=True)
    complete = (tmp_path / "follow.jsonl").read_bytes()
    (tmp_path / "follow.jsonl").write_bytes(complete[:-5])
    runner = FakeRunner()
    run_follower(tmp_path, runner, once=True)
    assert runner.folders == ["iter_0000002"]
    assert iterations(tmp_path) == [1, 2]
    (tmp_path / "follow.jsonl").write_text("no\n")
    with refused(DataError, "line 1"):
        run_follower(tmp_path, FakeRunner(), once=True)


def test_retention_deletes_the_held_checkpoint_only_afterwards(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = CheckpointFolder(tmp_path, Files())

    def retain(path: Path) -> None:
        if path.name == "iter_0000001":
            save(tmp_path, 2, 3)
            assert [folder.delete(folder.iteration(n), f"n-{n}") for n in (1, 2)] == [False, True]

    run_follower(tmp_path, FakeRunner(during=retain), once=True)
    assert iterations(tmp_path) == [1, 3]
    assert folder.delete(folder.iteration(1), "n-3")


def test_a_checkpoint_that_vanishes_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    take = Hold.take

    def delete_and_take(path: Path) -> Hold | None:
        if path.name == "iter_0000001":
            shutil.rmtree(path)
        return take(path)

    monkeypatch.setattr(Hold, "take", delete_and_take)
    caplog.set_level("INFO")
    assert run_follower(tmp_path, FakeRunner(), once=True)
    assert iterations(tmp_path) == [2]
    assert "iter_0000001 was deleted or replaced before it could be held" in caplog.text


def test_a_manifest_that_cannot_be_read_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    looks = iter([True, False, True])

    def fail_at_times(path: Path) -> ManifestVersion | None:
        if next(looks, False):
            raise OSError(errno.EIO, "it failed", str(path))
        return manifest_version(path)

    monkeypatch.setattr("trainer.follow.follower.manifest_version", fail_at_times)
    runner = FakeRunner(lambda: None)
    assert run_follower(tmp_path, runner)
    assert (iterations(tmp_path), runner.folders) == ([1], ["iter_0000001"])


def test_a_manifest_that_stays_unreadable_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    failing = mock.Mock(side_effect=OSError(errno.EIO, "it failed"))
    monkeypatch.setattr("trainer.follow.follower.manifest_version", failing)
    assert not run_follower(tmp_path, FakeRunner(), once=True)
    assert "iter_0000001 cannot be read: it failed" in caplog.text


@pytest.mark.parametrize("is_light_first", [False, True])
def test_a_checkpoint_without_its_optimizer_has_no_second_line(tmp_path: Path, *, is_light_first: bool) -> None:
    run = full_run(tmp_path).parent
    if is_light_first:
        reprise.drop_optimizer(run, before=20)
    run_follower(run, FakeRunner(), once=True)
    reprise.drop_optimizer(run, before=30)
    run_follower(run, FakeRunner(), once=True)
    assert iterations(run) == [10, 20, 30]


def test_the_result_of_a_renamed_checkpoint_is_dropped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = CheckpointFolder(tmp_path, Files())

    def rewind(path: Path) -> None:
        if not folder.superseded():
            folder.supersede([1])
            save(tmp_path, 1)

    runner = FakeRunner(during=rewind)
    assert run_follower(tmp_path, runner, once=True)
    (line,) = lines(tmp_path)
    assert line["result"]["n"] == 2
    assert not list(tmp_path.rglob("hold*"))


def test_a_damaged_checkpoint_is_named_once_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "iter_0000001" / "trainer_state.json").write_text("{}")
    assert run_follower(tmp_path, FakeRunner(lambda: None, lambda: None))
    assert caplog.text.count("iter_0000001 cannot be opened") == 1
    assert iterations(tmp_path) == [2]
    assert not run_follower(tmp_path, FakeRunner(), once=True)


def end_run(folder: Path, iteration: int, **train: object) -> None:
    """Give a checkpoint the configuration of a run of the trainer; a follower reads its length there."""
    (folder / f"iter_{iteration:07d}" / "run_config.json").write_text(json.dumps({"config": {"train": train}}))


@pytest.mark.parametrize(("train", "is_over"), [({"train_iters": 2}, True), ({"train_iters": 3}, False), ({}, False)])
def test_a_follower_ends_with_the_run(tmp_path: Path, train: dict[str, int], is_over: bool) -> None:
    save(tmp_path, 1, 2)
    end_run(tmp_path, 2, **train)
    runner = FakeRunner()
    assert run_follower(tmp_path, runner)
    assert runner.is_stopped == (not is_over)
    assert iterations(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", range(1, 7))
def test_a_last_save_between_two_looks_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The last checkpoint is committed after any listing of the folder, and the run then reads as ended."""
    save(tmp_path, 1)
    committed, calls = CheckpointFolder.committed, [0]

    def list_then_save(folder: CheckpointFolder) -> list[int]:
        listed = committed(folder)
        calls[0] += 1
        if calls[0] == call:
            save(tmp_path, 2)
            end_run(tmp_path, 2, train_iters=2)
        return listed

    monkeypatch.setattr(CheckpointFolder, "committed", list_then_save)
    assert run_follower(tmp_path, FakeRunner(*[lambda: None] * 3))
    assert iterations(tmp_path) == [1, 2]


def test_light_saves_are_over_when_their_lock_is_released(tmp_path: Path) -> None:
    save(tmp_path, 2)
    end_run(tmp_path, 2, train_iters=2)
    lock = FolderLock(tmp_path / "weights", "a run")
    lock.acquire()

    def end() -> None:
        lock.release()
        save(tmp_path / "weights", 2)

    runner = FakeRunner(lambda: None, end)
    assert run_follower(tmp_path, runner, weights=True)
    assert not runner.is_stopped
    assert iterations(tmp_path) == [2]


def test_a_metric_is_stored_by_its_dotted_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    result = {"results": {"arc_easy": {"acc,none": 0.25, "nan": float("nan"), "flag": True, "text": "1"}}}
    metric, runner = "results.arc_easy.acc,none", FakeRunner(during=lambda _: CommandOutcome(0, 1.0, result))
    run_follower(tmp_path, runner, once=True, metric=metric)
    assert [(line["metric"], line["value"]) for line in lines(tmp_path)] == [(metric, 0.25)]
    odd = ("results.arc_easy.nan", "results.arc_easy.flag", "results.arc_easy.text", "results.arc_easy.text.x")
    others = ("results", *odd, "acc,none", "", f"{metric}.x")
    assert {number_at(result, name) for name in others} | {number_at(None, "a")} == {None}
    save(tmp_path, 3)
    run_follower(tmp_path, FakeRunner(), once=True, metric="missing")
    assert lines(tmp_path)[-1]["value"] is None
    assert "missing" in caplog.text


def test_the_command_line_runs_a_real_command(tmp_path: Path, capfd: Printed) -> None:
    save(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path / "checkpoints"), "--once", "--json-metric", "a.b", "--", *ECHO]) == 1
    assert [(line["value"], line["status"], line["result"]) for line in lines(tmp_path)] == [
        (2.5, status, {"a": {"b": 2.5}}) for status in (0, 4)
    ]
    printed = capfd.readouterr().out.splitlines()
    assert [printed[0], *printed[3:6]] == ["text", "{torn", "[3]", str(tmp_path / "checkpoints" / "iter_0000001")]
    assert main([str(tmp_path), "--once", "--name", "b", "--from", "2", "--every", "2", "--", *ECHO]) == 1
    assert [line["iteration"] for line in lines(tmp_path, "follow.b.jsonl")] == [2]


def test_two_followers_need_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    def refuse(_: FolderLock) -> None:
        raise LockError("taken")

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FolderLock, "check", refuse)
        with pytest.raises(LockError):
            run_follower(tmp_path, FakeRunner(), once=True)
    assert lines(tmp_path) == []
    lock = FolderLock(tmp_path, "another", name="follow.lock")
    lock.acquire()
    try:
        assert main([str(tmp_path), "--once", "--", *ECHO]) == 2
        assert "--name" in capsys.readouterr().err
        assert main([str(tmp_path), "--once", "--name", "b", "--", *ECHO]) == 0
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("none --once -- true {}", "none"),
        ("https://bucket/run -- true {}", "https://bucket/run"),
        ("run -- true", "{}"),
        ("run --name a/b -- true {}", "--name"),
        ("run --every 0 -- true {}", "--every"),
        ("run --once -- ./no-such-program {}", "(./no-such-program)"),
    ],
)
def test_a_wrong_use_is_one_message(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", 1)
    try:
        ended = main(words.split())
    except SystemExit as error:
        ended = int(str(error.code))
    assert ended == 2
    assert named in capsys.readouterr().err


KILL = f"import os, signal; kill = lambda number: os.kill({os.getpid()}, number); "


@pytest.mark.parametrize(
    "text",
    [
        KILL + "kill(signal.SIGTERM); signal.pause()",
        # The second signal kills a command that ignores the first.
        KILL + "signal.signal(signal.SIGTERM, lambda *_: kill(signal.SIGINT)); kill(signal.SIGTERM)\n"
        "while True: signal.pause()",
    ],
    ids=["once", "twice"],
)
def test_a_signal_ends_the_command_and_the_follower(tmp_path: Path, text: str) -> None:
    """The command sends the signal itself, and would then run for ever."""
    save(tmp_path, 1, 2)
    assert main([str(tmp_path), "--", sys.executable, "-S", "-c", text, "{}"]) == 0
    assert lines(tmp_path) == []
    assert not list(tmp_path.rglob("hold*"))


def test_a_signal_ends_a_pause_and_the_handlers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("trainer.follow.follower.is_dir", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main([str(tmp_path / "absent")]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 900 + "]" * 900 + "}", '{"a": NaN, "b": "\\ud800"}'])
def test_an_object_that_no_line_can_hold_ends_no_follower(tmp_path: Path, text: str) -> None:
    save(tmp_path, 10)
    assert main([str(tmp_path), "--once", "--", sys.executable, "-S", "-c", f"print({text!r})", "{}"]) == 0
    assert [line["status"] for line in lines(tmp_path)] == [0]
