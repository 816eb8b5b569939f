"""The command `scripts/compare_loss.py`: what it prints and which status it returns."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from trainer.commands.compare_loss import main

SCRIPT = ROOT / "scripts" / "compare_loss.py"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def compare_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the script in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        try:
            status = main([*map(str, arguments)])
        except SystemExit as left:  # argparse's way
            status = int(str(left.code))
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, printed.out, printed.err)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Run:
    """Run the script as a user does, from another folder."""

    def run(*arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def make_run(folder: Path, losses: dict[int, float], dtype: str = "float32") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"train:\n  dtype: {dtype}\n")
    records = (
        {"iteration": i, "loss": loss if math.isfinite(loss) else None, "loss_hex": loss.hex(), "lr": 1e-4}
        for i, loss in losses.items()
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    return folder


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.stderr == ""
    return result.stdout.splitlines()[-1]


CURVE = {i: 10 / i for i in range(1, 101)} | {7: math.nan, 8: math.inf}


def test_equal_runs_exit_with_0_and_are_bit_identical(tmp_path: Path, script: Run) -> None:
    result = script(make_run(tmp_path / "a", CURVE), make_run(tmp_path / "b", CURVE))
    assert (result.returncode, last_line(result)) == (0, "bit-identical: 100/100 iterations")
    first, second, third = result.stdout.splitlines()[:3]
    assert first.startswith("base ")
    assert first.endswith(f"{tmp_path}/a/metrics.jsonl: 100 iterations, 1 to 100, float32")
    assert "b/metrics.jsonl" in second
    assert "1e-05" in third


def test_a_resumed_run_is_equal_only_with_the_prefix_allowed(tmp_path: Path, compare_loss: Run) -> None:
    whole = make_run(tmp_path / "whole", CURVE)
    resumed = make_run(tmp_path / "resumed", {i: CURVE[i] for i in range(41, 101)})
    refused = compare_loss(whole, resumed)
    assert (refused.returncode, last_line(refused)) == (
        1,
        "bit-identical: 60/60 iterations in both; MISSING: 40 in test (first at 1)",
    )
    allowed = compare_loss(whole, resumed, "--allow-missing-prefix", "--bitwise")
    assert (allowed.returncode, last_line(allowed)) == (0, "bit-identical: 60/100 iterations")
    assert "1-40 (40 in all)" in allowed.stdout


def test_missing_iterations_are_told_apart_from_different_ones(tmp_path: Path, compare_loss: Run) -> None:
    whole, off = make_run(tmp_path / "whole", CURVE), make_run(tmp_path / "off", CURVE | {3: 9.0})
    short = make_run(tmp_path / "short", {i: CURVE[i] for i in range(1, 21)})
    result = compare_loss(whole, off, short)
    assert (result.returncode, last_line(result)) == (
        1, "DIFFERENT: 1 of 2 runs from whole: off; MISSING: iterations of 1 of 2 runs: short",
    )  # fmt: skip
    rows = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()[1:]]
    assert [(row[1], *row[3:7]) for row in rows] == [
        ("DIFFERENT", "100", "0", "1", "3"),
        ("MISSING", "20", "80", "0", "-"),
    ]
    found = json.loads(compare_loss(whole, short, "--json").stdout)["runs"][0]
    assert (found["equal"], found["different"], found["missing_in_test"]) == (False, 0, 80)
    both = compare_loss(off, short)
    said = "DIFFERENT: 1 of 20 iterations in both, first at 3; MISSING: 80 in test (first at 21)"
    assert (both.returncode, last_line(both)) == (1, said)


def test_different_runs_exit_with_1_and_name_the_first_iteration(tmp_path: Path, compare_loss: Run) -> None:
    other = CURVE | {41: 9.0, 60: math.nan, 8: -math.inf}
    result = compare_loss(make_run(tmp_path / "a", CURVE), make_run(tmp_path / "b", other))
    assert (result.returncode, last_line(result)) == (1, "DIFFERENT: 3 of 100 iterations, first at 8")


def test_the_threshold_follows_the_dtype_and_its_override(tmp_path: Path, compare_loss: Run) -> None:
    base = make_run(tmp_path / "a", CURVE, dtype="bfloat16")
    test = make_run(tmp_path / "b", CURVE | {50: CURVE[50] + 1e-3}, dtype="bfloat16")
    within = compare_loss(base, test)
    assert (within.returncode, last_line(within)) == (0, "equal within 0.01: 100/100 iterations")
    assert compare_loss(base, test, "--dtype", "float32").returncode == 1
    assert compare_loss(base, test, "--dtype", "float32", "--threshold-fp32", "2e-3").returncode == 0
    assert compare_loss(base, test, "--threshold-bf16", "1e-4").returncode == 1
    assert compare_loss(base, test, "--threshold-bf16", "0", "--rtol", "0.1").returncode == 0
    assert compare_loss(base, test, "--bitwise").returncode == 1


def test_a_text_log_compares_with_metrics_but_not_bitwise(tmp_path: Path, compare_loss: Run) -> None:
    run = make_run(tmp_path / "a", CURVE)
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {i:5d}/100 | train loss {loss:.6f} | lr 1e-4\n" for i, loss in CURVE.items()))
    result = compare_loss(run, log)
    assert (result.returncode, last_line(result)) == (0, "equal within 1e-05: 100/100 iterations")
    bitwise = compare_loss(run, log, "--bitwise")
    assert bitwise.returncode == 2
    assert "train.log" in bitwise.stderr


def test_last_wins_reads_the_log_of_a_resumed_run(tmp_path: Path, compare_loss: Run) -> None:
    (tmp_path / "a.log").write_text("iter 1: loss 2.0, x\niter 1: loss 3.0, x\n")
    (tmp_path / "b.log").write_text("iter 1: loss 3.0, x\n")
    assert compare_loss("a.log", "b.log").returncode == 2
    assert compare_loss("a.log", "b.log", "--last-wins").returncode == 0


@pytest.mark.parametrize("text", ["", "hello\n"])
def test_inputs_without_a_loss_exit_with_2_even_if_equal(tmp_path: Path, compare_loss: Run, text: str) -> None:
    (tmp_path / "a.log").write_text(text)
    result = compare_loss("a.log", "a.log")
    assert (result.returncode, result.stdout) == (2, "")
    assert "a.log" in result.stderr
    assert "train loss" in result.stderr


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "much"])
def test_a_threshold_that_is_no_amount_is_refused(compare_loss: Run, value: str) -> None:
    assert compare_loss("a", "b", f"--rtol={value}").returncode == 2


def test_a_torn_last_record_is_said_in_a_note(tmp_path: Path, compare_loss: Run) -> None:
    base = make_run(tmp_path / "a", CURVE)
    with (base / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 101, "lo')
    result = compare_loss(base, make_run(tmp_path / "b", CURVE))
    assert result.returncode == 0
    assert "line 101 is torn" in result.stdout


@pytest.mark.parametrize("other", [CURVE, CURVE | {41: 9.0, 7: 1.0}, {500: 1.0}, {7: math.nan}])
def test_a_plot_is_written_for_any_curves(tmp_path: Path, compare_loss: Run, other: dict[int, float]) -> None:
    pytest.importorskip("matplotlib")
    result = compare_loss(make_run(tmp_path / "a", CURVE), make_run(tmp_path / "b", other), "--plot", "out.png")
    assert result.returncode in (0, 1)
    assert result.stderr == "reprise compare-loss: wrote out.png\n"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_are_equal_only_if_all_are(tmp_path: Path, compare_loss: Run) -> None:
    base, same, again = (make_run(tmp_path / name, CURVE) for name in ("base", "same", "again"))
    off = make_run(tmp_path / "off", CURVE | {41: 9.0, 60: 1.0})
    equal = compare_loss(base, same, again)
    assert (equal.returncode, last_line(equal)) == (0, "equal: 2 of 2 runs to base")
    one = compare_loss(base, same, off, again, "--bitwise")
    assert (one.returncode, last_line(one)) == (1, "DIFFERENT: 1 of 3 runs from base: off")
    header, *rows = (line.split() for line in one.stdout.split("\n\n")[1].splitlines())
    assert header[0] == "run"
    assert [row[0] for row in rows] == ["same", "off", "again"]
    assert [row[1] for row in rows] == ["bit-identical", "DIFFERENT", "bit-identical"]
    assert rows[1][-5:] == ["0", "2", "41", f"{9.0 - CURVE[41]:.3e}", "41"]


def test_of_several_runs_one_that_cannot_be_read_exits_with_2(tmp_path: Path, compare_loss: Run) -> None:
    run = make_run(tmp_path / "a", CURVE)
    result = compare_loss(run, run, tmp_path / "absent")
    assert (result.returncode, result.stdout) == (2, "")
    assert "absent" in result.stderr


def test_json_says_what_the_table_says_in_standard_json(tmp_path: Path, compare_loss: Run) -> None:
    base, same = make_run(tmp_path / "base", CURVE), make_run(tmp_path / "same", CURVE)
    off = make_run(tmp_path / "off", CURVE | {8: 1.0})
    result = compare_loss(base, same, off, "--bitwise", "--json")
    assert result.returncode == 1

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(result.stdout, parse_constant=refuse)
    assert found["base"]["run"] == "base"
    assert found["equal"] is False
    assert [(run["run"], run["equal"], run["first_different_iteration"]) for run in found["runs"]] == [
        ("same", True, None),
        ("off", False, 8),
    ]
    assert found["runs"][0]["largest_loss_difference"] is None
    largest = found["runs"][1]["largest_loss_difference"]
    assert (largest["iteration"], largest["difference"], largest["base_hex"]) == (8, None, "inf")
    alone = json.loads(compare_loss(base, same, "--json").stdout)
    assert alone["equal"] is True
    assert len(alone["runs"]) == 1


def test_a_plot_of_several_runs_is_written_for_any_curves(tmp_path: Path, compare_loss: Run) -> None:
    pytest.importorskip("matplotlib")
    others = [CURVE, CURVE, CURVE | {41: 9.0, 7: 1.0}, {500: 1.0}, {7: math.nan}]
    runs = [make_run(tmp_path / f"run{number}", other) for number, other in enumerate(others)]
    base = make_run(tmp_path / "base", CURVE)
    for chosen in (runs, runs[:2], runs[3:]):
        result = compare_loss(base, *chosen, "--plot", "out.png")
        assert result.returncode in (0, 1)
        assert result.stderr == "reprise compare-loss: wrote out.png\n"
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "out.png").unlink()


@pytest.mark.parametrize("target", ["absent/out.png", "out.unknown"])
def test_a_plot_that_cannot_be_written_exits_with_2(tmp_path: Path, compare_loss: Run, target: str) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "a", CURVE)
    result = compare_loss(run, run, "--plot", target)
    assert result.returncode == 2
    assert target in result.stderr
    assert "Traceback" not in result.stderr


def test_without_matplotlib_only_a_plot_fails_naming_the_extra(tmp_path: Path, script: Run) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError('not installed')\n")
    run = make_run(tmp_path / "a", CURVE)
    assert script(run, run, path=hidden).returncode == 0
    result = script(run, run, "--plot", "out.png", path=hidden)
    assert result.returncode == 2
    assert "pip install 'torch-reprise[plot]'" in result.stderr


def make_logs(folder: Path, **losses: float) -> Path:
    folder.mkdir()
    for name, loss in losses.items():
        (folder / f"{name}.log").write_text("".join(f"step {n}/2 | train loss {loss + n:.6f} |\n" for n in (1, 2)))
    return folder


def test_two_folders_of_logs_are_compared_by_name(tmp_path: Path, compare_loss: Run) -> None:
    base = make_logs(tmp_path / "a", gpt2=1.0, llama3_bfloat16=2.0)
    same = make_logs(tmp_path / "b", gpt2=1.0, llama3_bfloat16=2.009)  # within the threshold of its dtype
    equal = compare_loss(base, same)
    assert equal.returncode == 0
    assert "gpt2.log\n" in equal.stdout
    assert equal.stdout.endswith("2 of 2 logs are equal\n")
    assert compare_loss(base, same, "--dtype", "float32").returncode == 1
    other = make_logs(tmp_path / "c", gpt2=1.5, llama3_bfloat16=2.0)
    different = compare_loss(base, other)
    assert (different.returncode, different.stdout.splitlines()[-1]) == (1, "1 of 2 logs are equal")
    assert json.loads(compare_loss(base, other, "--json").stdout)["equal"] is False


def test_a_log_of_one_folder_alone_is_a_difference(tmp_path: Path, compare_loss: Run) -> None:
    base, test = make_logs(tmp_path / "a", gpt2=1.0, llama3=2.0), make_logs(tmp_path / "b", gpt2=1.0)
    result = compare_loss(base, test)
    assert result.returncode == 1
    assert f"llama3.log is in {base} alone" in result.stdout


def test_folders_without_logs_in_common_are_refused(tmp_path: Path, compare_loss: Run) -> None:
    base, test = make_logs(tmp_path / "a", gpt2=1.0), make_logs(tmp_path / "b", llama3=1.0)
    assert compare_loss(base, test).returncode == 2
    assert compare_loss(base, base, test).returncode == 2
    assert compare_loss(base, base, "--plot", "x.png").returncode == 2


def test_one_threshold_serves_every_dtype(tmp_path: Path, compare_loss: Run) -> None:
    for dtype in ("float32", "bfloat16"):
        base = make_run(tmp_path / f"{dtype}_a", {1: 1.0}, dtype)
        test = make_run(tmp_path / f"{dtype}_b", {1: 1.001}, dtype)
        assert compare_loss(base, test, "--threshold", "0.002").returncode == 0
        assert compare_loss(base, test, "--threshold", "0.0005").returncode == 1


def test_metrics_of_followers_are_shown_beside_the_losses(tmp_path: Path, compare_loss: Run) -> None:
    for name, value in (("a", 0.25), ("b", 0.5), ("c", 0.75)):
        make_run(tmp_path / name, {1: 2.0, 2: 1.5})
        line = {"iteration": 2, "metric": "acc", "value": value}
        (tmp_path / name / "follow.jsonl").write_text(json.dumps(line) + "\n")
    ended = compare_loss("a", "b", "--plot", "two.png")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    assert [row.split() for row in lines[:3]] == [["metric", "iteration", "a", "b"], ["acc", "2", "0.25", "0.5"], []]
    assert lines[-1].startswith("bit-identical")
    ended = compare_loss("a", "b", "c", "--plot", "three.png", "--json")
    metrics = json.loads(ended.stdout)["evaluations"]
    assert metrics == {"a": {"acc": {"2": 0.25}}, "b": {"acc": {"2": 0.5}}, "c": {"acc": {"2": 0.75}}}
    assert all((tmp_path / name).stat().st_size > 0 for name in ("two.png", "three.png"))
