"""What `metrics.jsonl` keeps when a run goes on from an earlier iteration."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reprise.errors import TrainerError
from reprise.saving import SaveReport
from reprise.storage import Files
from tests.fakes import iteration_record
from tests.messages import refused
from trainer import metrics
from trainer.compare.read import read_curve
from trainer.launch import start_times
from trainer.launch.start_times import StartTimes
from trainer.metrics.event_file import EventFile
from trainer.metrics.jsonl_file import JsonlFile, cut_after, last_saved_iteration
from trainer.metrics.launch_log import LaunchOutcome
from trainer.metrics.memory import MemoryPeaks
from trainer.metrics.run_log import RunLog, Slowdown, peak_flops
from trainer.metrics.tensorboard_sink import TensorboardSink


def run_log(folder: Path, **changes: object) -> RunLog:
    settings = {"train_iters": 10, "mfu_scale": None, **changes}
    return RunLog(folder, **settings)  # type: ignore[arg-type]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def iterations(path: Path) -> list[int]:
    return [record["iteration"] for record in records(path)]


def lines(*numbers: int) -> str:
    return "".join(json.dumps({"iteration": number}) + "\n" for number in numbers)


@pytest.mark.parametrize(
    ("text", "last", "rest"),
    [
        (lines(1, 2), lines(3, 4), '{"iteration": 5, "lo'),
        ("", lines(1, 2, 3), ""),
        (lines(1), "", '{"iteration": 9}'),  # whole, but for its newline
        (lines(1, 2), "", "\0\ufffd" * 7),
        (lines(1, 2), "", ""),
        ("", "", ""),
    ],
)
def test_later_and_torn_lines_go_to_a_file_beside(tmp_path: Path, text: str, last: str, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text + last + rest)
    kept = [json.loads(line)["iteration"] for line in text.splitlines()]
    cut_after(path, max(kept, default=0))
    assert path.read_text() == text
    beside = [file.read_text() for file in tmp_path.iterdir() if file != path]
    assert beside == ([last + rest] if last or rest else [])


def count(folder: Path) -> dict[str, int]:
    """Return how often each line is in the files of a run."""
    found = Counter[str]()
    for path in folder.glob("metrics*.jsonl"):
        found.update(path.read_text().splitlines())
    return dict(found)


class Killed(BaseException):
    """What stands for the end of the process here; the tests of crashes end real ones."""


@pytest.mark.parametrize("calls", range(14))
@pytest.mark.parametrize("again", [0, 50, 52, 60])
def test_a_cut_that_is_killed_anywhere_loses_and_doubles_nothing(
    tmp_path: Path, calls: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that ends late has its line behind those of later iterations."""
    path, save = tmp_path / "metrics.jsonl", json.dumps({"iteration": 50, "event": "save"}) + "\n"
    path.write_text(lines(*range(1, 52)) + save + lines(52, 53) + '{"iteration": 54, "lo')
    whole, old = dict.fromkeys(path.read_text().splitlines(), 1), path.open()
    left = calls

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **keywords: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **keywords)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("write_whole", "sync", "rename", "sync_folder", "remove"):
            patch.setattr(Files, name, dying(getattr(Files, name)))
        with contextlib.suppress(Killed):
            cut_after(path, 50)
            assert iterations(path) == [*range(1, 51), 50]
            assert not os.path.samestat(path.stat(), os.fstat(old.fileno())), "a suspended process has the old file"
    old.close()
    cut_after(path, again)
    assert set(iterations(path)) <= set(range(1, again + 1))
    assert count(tmp_path) == whole
    assert not list(tmp_path.glob(".*"))


def test_lines_wait_for_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = run_log(tmp_path)
    log.open(0, "a: 1\n")
    log.iteration(iteration_record(1))
    write, is_full = os.write, True

    def fill(descriptor: int, data: bytes) -> int:
        if is_full and len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, bytes(data[: len(data) - 10] if is_full else data))

    monkeypatch.setattr(os, "write", fill)
    for iteration in (2, 3):
        log.iteration(iteration_record(iteration))
        log.sync()
    assert caplog.text.count("its lines wait in memory") == 1
    is_full = False
    log.iteration(iteration_record(4))
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    log.close()


def test_a_failing_disk_costs_tensorboard_points_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = run_log(tmp_path, sinks=[TensorboardSink()])
    log.open(0, "a: 1\n")
    (tmp_path / "tensorboard").write_text("a file where the folder is to be")
    for iteration in (1, 2):
        log.iteration(iteration_record(iteration))
        log.sync()
    assert caplog.text.count("could not be written to tensorboard") == 1
    (tmp_path / "tensorboard").unlink()
    log.iteration(iteration_record(3))
    with monkeypatch.context() as patch:  # a write that fails may have left half a record
        patch.setattr(EventFile, "write", lambda *_: os.rmdir(tmp_path))
        log.iteration(iteration_record(4))
        log.iteration(iteration_record(5))  # leaves no empty file
    log.iteration(iteration_record(6))
    log.close()
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2
    points = EventAccumulator(str(tmp_path / "tensorboard"))
    points.Reload()
    assert [event.step for event in points.Scalars("loss/train")] == [3, 6]


def test_a_broken_tensorboard_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, tried = run_log(tmp_path, sinks=[TensorboardSink()]), list[str]()
    log.open(0, "a: 1\n")

    def find_spec(name: str, *_: object) -> None:
        if name == "trainer.metrics.event_file":
            tried.append(name)
            raise ImportError(name)

    monkeypatch.delitem(sys.modules, "trainer.metrics.event_file")
    monkeypatch.delattr(metrics, "event_file")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    for iteration in (1, 2, 3):
        log.iteration(iteration_record(iteration))
    log.close()
    assert len(tried) == caplog.text.count("could not be written to tensorboard") == 1
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_training_goes_on_while_a_save_syncs_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_log(tmp_path, sinks=[TensorboardSink()])
    log.open(0, "a: 1\n")
    log.iteration(iteration_record(1))
    is_syncing, may_end = threading.Event(), threading.Event()

    def stuck(_: int) -> None:
        is_syncing.set()
        assert may_end.wait(60)

    monkeypatch.setattr(os, "fsync", stuck)
    thread = threading.Thread(target=log.sync, daemon=True)
    thread.start()
    assert is_syncing.wait(60)
    log.iteration(iteration_record(2))  # would wait for the disk
    assert thread.is_alive()
    may_end.set()
    thread.join(60)
    log.close()
    assert iterations(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_closed_log_is_durable_for_a_save_that_ends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, syncs = run_log(tmp_path), list[int]()
    log.open(0, "a: 1\n")
    log.iteration(iteration_record(1))
    monkeypatch.setattr(os, "fsync", syncs.append)
    log.close()
    log.sync()
    assert len(syncs) == 1
    lines = JsonlFile(tmp_path / "lines.jsonl", lambda: 0.0)
    lines.close()
    lines.sync()
    assert len(syncs) == 2
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_run_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with refused(TrainerError, "errno 17", "run.dir"):
        run_log(tmp_path / "run").open(0, "")


# As InfiniTrain's compare_tps.py looks for an iteration and its tokens per second.
INFINITRAIN_LINE = re.compile(r"step\s+(\d+)/\d+.*\|\s+(\d+)\s+tok/s")


def test_a_line_is_shown_for_an_iteration_with_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = run_log(tmp_path, mfu_scale=1e-5, clock=iter(range(0, 1000, 30)).__next__)
    log.open(0, "")
    for iteration in range(1, 11):
        log.iteration(
            iteration_record(iteration), memory=MemoryPeaks(8_100_000_000) if iteration in (4, 8, 10) else None
        )
    log.evaluation(10, 2.0, None)
    log.close()
    *messages, evaluation = caplog.messages
    assert not INFINITRAIN_LINE.search(evaluation)
    assert [INFINITRAIN_LINE.findall(message) for message in messages] == [[(n, "2000")] for n in ("4", "8", "10")]
    assert [message.partition(" | 500.0 ms")[2] for message in messages] == [
        " | 2000 tok/s | mfu 2.0% | 8.1 GB | 3.0 min to go",
        " | 2000 tok/s | mfu 2.0% | 8.1 GB | 60.0 s to go",
        " | 2000 tok/s | mfu 2.0% | 8.1 GB",
    ]
    assert all("train loss 2.500000" in message for message in messages)
    assert iterations(tmp_path / "metrics.jsonl") == [*range(1, 11), 10]


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_line_has_what_is_known_of_its_iteration(tmp_path: Path, loss: float) -> None:
    log = run_log(tmp_path)
    log.open(0, "")
    for iteration, memory in enumerate([None, MemoryPeaks(5), MemoryPeaks(7, 3, 4)], start=1):
        log.iteration(iteration_record(iteration, loss=loss), memory=memory)
    log.close()
    found = records(tmp_path / "metrics.jsonl")
    assert [{key: record[key] for key in record if "peak" in key or "reserved" in key} for record in found] == [
        {}, {"host_peak_bytes": 5}, {"host_peak_bytes": 7, "device_peak_bytes": 3, "device_reserved_bytes": 4},
    ]  # fmt: skip
    assert {(record["loss"], record["loss_hex"]) for record in found} == {(None, loss.hex())}


def test_a_launch_marks_its_first_iteration_and_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for after in (0, 2, 2):
        log = run_log(tmp_path)
        description = {"topology": {"world_size": 4}}
        log.open(after, "a: 1\n", age_s=5.0, launch=f"launch {after}", description=description)
        monkeypatch.setattr(start_times, "time", SimpleNamespace(monotonic=[12.5, 10.0].pop))
        times = StartTimes()
        times.end("imports")
        log.started(times)
        for iteration in (after + 1, after + 2, after + 3):
            log.iteration(iteration_record(iteration))
        log.ended(after + 3, LaunchOutcome.stopped, "SIGTERM")
        log.close()
    found = records(tmp_path / "metrics.jsonl")
    assert [[record.get(key) for key in ("iteration", "resumed", "launch")] for record in found] == [
        [1, None, "launch 0"], [2, None, None], [3, True, "launch 2"], [4, None, None], [5, None, None],
    ]  # fmt: skip
    assert [record["iteration"] for record in found if "start" in record] == [1, 3]
    assert found[0]["start"] == found[2]["start"] == times.seconds()
    assert found[0]["start"]["imports"] == 2.5
    assert [record["time"] for record in found] == sorted(record["time"] for record in found)
    assert read_curve(tmp_path).points.iterations.tolist() == [1, 2, 3, 4, 5]
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    begin, end = records(tmp_path / "launches.jsonl")[-2:]
    assert begin["time"] - begin.pop("began") == pytest.approx(5.0, abs=1.0)
    assert end.pop("time") >= begin.pop("time")
    assert begin == {"event": "begin", "launch": "launch 2", "iteration": 2, "topology": {"world_size": 4}}
    assert end == {"event": "end", "launch": "launch 2", "iteration": 5, "outcome": "stopped", "reason": "SIGTERM"}


def test_a_batch_that_grows_beside_a_save_is_no_slowdown() -> None:
    slowdown = Slowdown()
    for _ in range(3):
        slowdown.add(1.0, 8, is_saving=False)
    slowdown.add(2.0, 16, is_saving=True)
    slowdown.add(2.5, 16, is_saving=True)
    assert slowdown.take() == 0.5
    assert slowdown.take() == 0.0


def test_a_save_has_two_figures_in_its_line_and_all_in_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = run_log(tmp_path)
    log.open(0, "")
    for slowdown_s in (-0.5, 0.25):
        log.save(SaveReport(1, tmp_path, 10, 0.5, blocked_s=0.1, waited_s=0.02), slowdown_s=slowdown_s)
    log.close()
    assert re.findall(r"[\d.]+ (?:s|MB)\b", caplog.messages[0]) == ["0.50 s", "0.0 MB", "0.120 s"]
    recorded = records(tmp_path / "metrics.jsonl")
    assert [line["slowdown_seconds"] for line in recorded] == [-0.5, 0.25]  # as measured: sums have no bias
    assert {"blocked_seconds", "waited_seconds", "copied_bytes", "gigabytes_per_second"} <= recorded[0].keys()


def test_the_peak_of_a_device_is_found_by_its_name() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Radeon") is None


def test_the_last_save_is_told_from_the_last_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_saved_iteration(path) is None
    path.write_text('{"iteration": 2}\n{"iteration": 2, "event": "local_save"}\n{"iteration": 1, "event": "save"}\n')
    with path.open("a") as file:
        file.write('{"iteration": 3}\n{"iteration": 3, "event": "weights_save"}\n{"iteration": 3, "event": "save"}')
    assert last_saved_iteration(path) == 2
