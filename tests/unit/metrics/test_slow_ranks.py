"""The line that names the slowest rank, from times that are made up and from two real ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from tests.harness import TINY, around_iterations, call_on_ranks
from trainer.__main__ import main
from trainer.metrics import slow_ranks
from trainer.metrics.slow_ranks import OwnTime, RankTime, SlowRanks
from trainer.run.build import Run


def test_the_slowest_rank_is_named_beside_the_median() -> None:
    ranks = SlowRanks()
    for _ in range(10):
        ranks.add([RankTime(0.1, 0.0), RankTime(0.1, 0.0), RankTime(0.09, 0.0), RankTime(0.131, 0.02)])
    assert ranks.take() == "slowest rank 3: 1.31 x median (data 0.2 s)"
    ranks.add([RankTime(0.2, 0.0), RankTime(0.1, 0.0)])  # a line counts from the one before
    assert ranks.take() == "slowest rank 0: 2.00 x median (data 0.0 s)"


@pytest.mark.parametrize("times", [[], [[RankTime(0.1, 0.0)]], [[RankTime(0.0, 0.0)] * 2]])
def test_nothing_is_said_of_one_rank_or_no_time(times: list[list[RankTime]]) -> None:
    ranks = SlowRanks()
    for row in times:
        ranks.add(row)
    assert ranks.take() == ""


def test_time_is_counted_once_and_data_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 10.0, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    own = OwnTime(torch.device("cpu"))
    with own.working():
        pass
    with own.loading():
        pass
    assert own.take() == RankTime(3.5, 2.5)
    assert own.take() == RankTime(0.0, 0.0)


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


def test_the_rank_with_slow_data_is_named(tmp_path: Path) -> None:
    arguments = ["model=gpt2_tiny", *TINY, "train.train_iters=8", "logging.log_interval=4", "data.kind=random"]
    arguments = [*arguments[:-1], f"run.dir={tmp_path / 'run'}", "checkpoint.save=null"]
    ended = call_on_ranks(_train_with_slow_data, arguments, folder=tmp_path / "ranks", ranks=2)
    assert ended.ok, ended.text
    lines = re.findall(r"step +(\d)/8 \| slowest rank (\d): ([\d.]+) x median \(data ([\d.]+) s\)", ended.outputs[0])
    assert [(line[0], line[1]) for line in lines] == [("4", "1"), ("8", "1")]
    assert all(float(ratio) > 1.2 and float(data) >= 4000.0 for _, _, ratio, data in lines), lines
