"""The line that names the slowest rank, from times that are made up and from two real ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import TINY, around_iterations, call_on_ranks
from trainer.__main__ import main
from trainer.metrics import slow_ranks
from trainer.metrics.slow_ranks import OwnTime, RankTime, slowest_rank
from trainer.run.build import Run


def test_the_slowest_rank_is_named_beside_the_mean() -> None:
    times = [RankTime(10**6, 10**5), RankTime(10**6, 0), RankTime(10**6, 0), RankTime(2 * 10**6, 2 * 10**5)]
    assert slowest_rank(times) == "slowest rank 3: 1.60 x mean (data 0.2 s)"


@pytest.mark.parametrize("times", [[10**6], [0, 0], [10**6, 10**6], [10**6, 1100 * 10**3]])
def test_nothing_is_said_of_one_rank_no_time_or_equal_times(times: list[int]) -> None:
    assert slowest_rank([RankTime(total, 0) for total in times]) is None


class Event:
    """An event of a stream that passes when told to."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.is_passed = False

    def record(self) -> None:
        EVENTS.append(self)

    def query(self) -> bool:
        return self.is_passed

    def elapsed_time(self, end: Event) -> float:
        assert self.is_passed
        assert end.is_passed
        return 1500.0  # milliseconds


EVENTS: list[Event] = []


def test_the_host_does_not_wait_for_work_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    EVENTS.clear()
    own = OwnTime(torch.device("cuda"))
    for _ in range(2):
        with own.working():
            pass
    EVENTS[0].is_passed = EVENTS[1].is_passed = True
    assert own.take() == RankTime(1500000, 0)  # of the first block: the stream has not passed the second
    assert own.take() == RankTime(0, 0)
    EVENTS[2].is_passed = EVENTS[3].is_passed = True
    assert own.take() == RankTime(1500000, 0)


def test_ranks_with_more_and_fewer_passes_have_equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.2, 1.0, 3.0, 5.0, 8.0, 0.0, 0.1, 1.0, 2.0, 5.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    times = []
    for load in (4 / 3, 2 / 3):
        own = OwnTime(torch.device("cpu"))
        own.load = load
        with own.loading():
            pass
        with own.working(own.load):
            pass
        with own.working():  # the optimizer's step: as long on every rank
            pass
        times.append(own.take())
    assert times == [RankTime(4650000, 200000), RankTime(4650000, 100000)]


class Ahead:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead_s


def _train_with_slow_data(arguments: list[str]) -> None:
    clock = Ahead()
    slow_ranks.time = clock  # type: ignore[assignment]

    def slow_down(run: Run, iteration: int) -> None:
        if run.cluster.rank == 1:
            with run.own_time.loading():
                clock.ahead_s += 1000.0

    around_iterations(before=slow_down)
    import sys

    sys.argv = ["trainer", *arguments]
    main()


@pytest.mark.slow
def test_the_rank_with_slow_data_is_named(tmp_path: Path) -> None:
    arguments = ["model=gpt2_tiny", *TINY, "train.train_iters=8", "logging.log_interval=4", "data.kind=random"]
    arguments = [*arguments[:-1], f"run.dir={tmp_path / 'run'}", "checkpoint.save=null"]
    ended = call_on_ranks(_train_with_slow_data, arguments, folder=tmp_path / "ranks", ranks=2)
    assert ended.ok, ended.text
    lines = re.findall(r"step +(\d)/8 \| slowest rank (\d): ([\d.]+) x mean \(data ([\d.]+) s\)", ended.outputs[0])
    assert [(line[0], line[1]) for line in lines] == [("4", "1"), ("8", "1")]
    assert all(float(ratio) > 1.2 and float(data) >= 4000.0 for _, _, ratio, data in lines), lines
