"""The command `scripts/compare_speed.py`: its figures, what it refuses and which status it returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reprise.saving import SaveReport
from tests.fakes import iteration_record
from tests.messages import Printed
from trainer.commands.compare_speed import main
from trainer.compare.speed import QUANTILES, measure, read_timing
from trainer.metrics.run_log import RunLog


def make_run(
    folder: Path, seconds: list[float], saves: dict[int, tuple[float, float]] | None = None, *, after: int = 0
) -> Path:
    """Write a run as the trainer does: iterations of 100 tokens, and saves with blocked and slowed-down seconds.

    With `after`, the run in the folder is resumed after that iteration.
    """
    log = RunLog(folder, train_iters=after + len(seconds), mfu_scale=None)
    log.open(after, "train:\n  dtype: float32\n")
    for iteration, taken in enumerate(seconds, start=after + 1):
        log.iteration(iteration_record(iteration, tokens=100, seconds=taken))
        log.evaluation(iteration, 2.0, 2.0)
        if saves and iteration in saves:
            blocked, slowdown = saves[iteration]
            report = SaveReport(iteration, folder, 1000, 0.5, blocked_s=blocked, waited_s=blocked)
            log.save(report, slowdown_s=slowdown)
    log.close()
    return folder


def test_the_figures_are_those_of_the_iterations_after_the_first(tmp_path: Path) -> None:
    seconds = [9.0, 9.0, *[0.5] * 8, 1.0]
    run = make_run(tmp_path / "a", seconds, {2: (7.0, 7.0), 5: (0.25, 1.5), 11: (0.0, 0.5)})
    speed = measure(read_timing(run).without_first(2))
    assert speed == {
        "tokens_per_second": dict.fromkeys(QUANTILES, 200.0) | {"p10": 180.0},
        # a fifth of the way from the last 0.5 to 1.0
        "seconds": dict.fromkeys(QUANTILES, 0.5) | {"p90": pytest.approx(0.6)},
        "iterations": 9,
        "saves": 2,
        "save_seconds": 0.5,
        "blocked_s": 0.5,
        "slowdown_s": 2.0,
        "checkpoint_share": 2.5 / 5.5,
        "tokens_per_second_overall": 900 / 5.5,
    }
    # Iterations that are faster beside a save earn it no time.
    faster = measure(read_timing(make_run(tmp_path / "b", [1.0], {1: (0.0, -0.5)})))
    assert (faster["slowdown_s"], faster["checkpoint_share"], faster["seconds"]["median"]) == (0.0, 0.0, 1.0)


def printed(capsys: Printed) -> list[list[list[str]]]:
    """Return the rows of each table that a command prints, word by word."""
    return [[line.split() for line in part.splitlines()] for part in capsys.readouterr().out.split("\n\n")]


def test_ratios_are_to_the_first_run(tmp_path: Path, capsys: Printed) -> None:
    slow, fast = make_run(tmp_path / "slow", [0.5] * 8, {7: (0.1, 0.0)}), make_run(tmp_path / "fast", [0.25] * 8)
    assert main([str(slow), str(fast)]) == 0
    _, (_, *pace), (_, *cost), [summary] = printed(capsys)
    assert summary[:4] == ["ok:", "0", "of", "1"]
    assert pace == [
        ["slow", "3", *["200.0"] * 5, "1.000", "0.5", "0.5", "0.5", "base"],
        ["fast", "3", *["400.0"] * 5, "2.000", "0.25", "0.25", "0.25", "ok"],
    ]
    assert cost == [
        ["slow", "1", "0.500", "0.200", "0.000", "11.76%", "176.5", "1.000"],
        ["fast", "0", "-", "0.000", "0.000", "0.00%", "400.0", "2.267"],
    ]


@pytest.mark.parametrize(
    ("seconds", "options", "status"),
    [
        ([0.5 / 0.891] * 9, [], 1),
        ([0.5 / 0.9] * 9, [], 0),
        ([0.625] * 9, ["--threshold", "0.2"], 0),
        ([0.5 / 0.79] * 9, ["--threshold", "0.2"], 1),
        ([1.0] * 9, ["--threshold", "0"], 1),
        ([0.5] * 12 + [5.0] * 3, [], 0),  # three iterations waited for something, which a mean would call slower
    ],
)
def test_a_run_slower_than_the_threshold_exits_with_1(
    tmp_path: Path, capsys: Printed, seconds: list[float], options: list[str], status: int
) -> None:
    base, test = (str(make_run(tmp_path / name, times)) for name, times in (("a", [0.5] * 9), ("b", seconds)))
    assert main([base, base, test, *options]) == status
    _, [*_, row], _, [summary] = printed(capsys)
    assert (row[0], row[-1]) == ("b", "SLOWER" if status else "ok")
    assert (summary[:4], summary[-1] == "b") == (["SLOWER:" if status else "ok:", f"{status}", "of", "2"], status == 1)
    assert main([base, test, "--json", *options]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["slower"] == ["b"][:status]
    assert [run["is_slower"] for run in report["runs"]] == [False, bool(status)]
    assert report["runs"][1]["slower_by"] == pytest.approx(1 - 0.5 / seconds[5])
    assert main([test, base, *options]) == 0, "faster is never a failure"


def test_the_first_iterations_after_every_start_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [9.0] * 5 + [0.5] * 5, {3: (7.0, 7.0), 10: (0.1, 0.0)})
    make_run(run, [9.0] * 5 + [0.5] * 2, {14: (7.0, 7.0), 17: (0.2, 0.0)}, after=9)
    timing = read_timing(run).without_first(5)
    assert timing.columns.iterations.tolist() == [6, 7, 8, 9, 15, 16]
    assert {*timing.columns.column("seconds")} == {0.5}
    assert len(timing.saves) == 0
    assert len(read_timing(run).without_first(0).columns) == 16


def test_json_is_written(tmp_path: Path, capsys: Printed) -> None:
    runs = [str(make_run(tmp_path / name, [0.5] * 8, {4: (0.1, 0.1)})) for name in "ab"]
    assert main([*runs, runs[0], "--json", "--skip", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["run"], run["iterations"], run["ratio"]) for run in found["runs"]] == [
        ("a", 8, 1.0),
        ("b", 8, 1.0),
        ("a (2)", 8, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("step 1/2 | train loss 2.0 | norm 1.0 | lr 1e-3 | 500.0 ms | 200 tokens/s\n", "metrics.jsonl"),
        ('{"iteration": 1, "loss": 2.0}\n', "seconds"),
        ('{"iteration": 1, "loss": 2.0, "seconds": 0, "tokens_per_second": 1}\n', "0.0 s"),
        ('{"iteration": 1, "loss": 2.0, "seconds": "1", "tokens_per_second": 1}\n', "seconds"),
        ('{"iteration": 1, "event": "save", "seconds": 1}\n', "blocked_seconds"),
        ('{"iteration": 1}\n[]\n', "line 2"),
    ],
)
def test_a_file_without_times_is_refused_with_its_reason(tmp_path: Path, capsys: Printed, text: str, word: str) -> None:
    (tmp_path / "a.log").write_text(text)
    assert main([str(tmp_path / "a.log")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert word in output.err
    assert "a.log" in output.err


def test_what_is_too_short_or_absent_exits_with_2(tmp_path: Path, capsys: Printed) -> None:
    run = str(make_run(tmp_path / "a", [0.5] * 5))
    assert main([run]) == 2
    assert "--skip" in capsys.readouterr().err
    assert main([run, str(tmp_path / "absent")]) == 2
    for threshold in ("20", "1", "-0.1", "nan", "x"):
        with pytest.raises(SystemExit, match="2"):
            main([run, run, "--threshold", threshold])
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "lo')
    assert main([run, "--skip", "4"]) == 0
    assert "line 11 is torn" in capsys.readouterr().out
