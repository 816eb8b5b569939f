"""The command `scripts/compare_loss.py`: what it prints and which status it returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import pytest

from tests import ROOT
from tests.messages import Printed
from tests.unit.compare.test_curves import record
from trainer.commands.compare_loss import main

SCRIPT = ROOT / "scripts" / "compare_loss.py"
CURVE = {i: 10 / i for i in range(1, 101)} | {7: nan, 8: inf}


def make_run(folder: Path, losses: dict[int, float], dtype: str = "float32") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"train:\n  dtype: {dtype}\n")
    (folder / "metrics.jsonl").write_text("".join(record(i, loss, lr=1e-4) + "\n" for i, loss in losses.items()))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a folder of its own, with runs by their names."""
    monkeypatch.chdir(tmp_path)
    runs = {
        "base": CURVE,
        "same": CURVE,
        "off": CURVE | {41: 9.0, 60: 1.0, 8: -inf},
        "late": {i: CURVE[i] for i in range(41, 101)},
        "short": {i: CURVE[i] for i in range(1, 21)},
        "apart": {500: 1.0},
    }
    for name, losses in runs.items():
        make_run(Path(name), losses)


def compare(words: str, capsys: Printed) -> tuple[int, str]:
    """Return the status and what was printed, which is nothing where it could not be compared."""
    status = main(words.split())
    printed = capsys.readouterr()
    assert (printed.out == "") == (status == 2)
    assert (printed.err == "") == (status != 2 and "--plot" not in words)
    return status, printed.out or printed.err


PREFIX = "bit-identical: 60/60 compared iterations, 40 missing before them"


@pytest.mark.parametrize(
    ("words", "status", "last"),
    [
        ("base same --bitwise", 0, "bit-identical: 100/100 iterations"),
        ("base off", 1, "DIFFERENT: 3 of 100 iterations, first at 8"),
        ("base late --allow-missing-prefix --bitwise", 0, PREFIX),
        ("off short", 1, "DIFFERENT: 1 of 20 iterations in both, first at 8; MISSING: 80 in test (first at 21)"),
        ("base same late same --allow-missing-prefix", 0, "3 of 3 runs are equal to base"),
        ("base same off same --bitwise", 1, "2 of 3 runs are equal to base"),
        ("base off short", 1, "0 of 2 runs are equal to base"),
    ],
)
def test_the_last_line_and_the_status_are_the_verdict(capsys: Printed, words: str, status: int, last: str) -> None:
    ended, text = compare(words, capsys)
    assert (ended, text.splitlines()[-1]) == (status, last)


def test_text_and_json_have_a_verdict_for_each_run(capsys: Printed) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    _, text = compare("base same off short", capsys)
    assert text.splitlines()[-4:-1] == [
        "same: bit-identical: 100/100 iterations",
        "off: DIFFERENT: 3 of 100 iterations, first at 8",
        "short: bit-identical: 20/20 iterations in both; MISSING: 80 in test (first at 21)",
    ]
    report = json.loads(compare("base same off short --bitwise --json", capsys)[1], parse_constant=refuse)
    assert (report["base"]["run"], report["equal"]) == ("base", False)
    fields = ("run", "equal", "first_different_iteration", "different", "missing_in_test")
    assert [tuple(run[field] for field in fields) for run in report["runs"]] == [
        ("same", True, None, 0, 0),
        ("off", False, 8, 3, 0),
        ("short", False, None, 0, 80),
    ]
    largest = report["runs"][1]["largest_loss_difference"]
    assert (largest["iteration"], largest["difference"], largest["base_hex"]) == (8, None, "inf")
    alone = json.loads(compare("base same --json", capsys)[1])
    assert (alone["equal"], [run["largest_loss_difference"] for run in alone["runs"]]) == (True, [None])


@pytest.mark.parametrize(
    ("dtype", "options", "status"),
    [
        ("bfloat16", "", 0),
        ("bfloat16", "--dtype float32", 1),
        ("bfloat16", "--dtype float32 --threshold-fp32 2e-3", 0),
        ("bfloat16", "--threshold-bf16 1e-4", 1),
        ("bfloat16", "--threshold-bf16 0 --rtol 0.1", 0),
        ("bfloat16", "--bitwise", 1),
        ("float32", "", 1),
        ("float32", "--threshold 0.002", 0),
    ],
)
def test_the_threshold_follows_the_dtype_and_its_override(
    capsys: Printed, dtype: str, options: str, status: int
) -> None:
    make_run(Path("a"), CURVE, dtype)
    make_run(Path("b"), CURVE | {50: CURVE[50] + 1e-3}, dtype)
    ended, text = compare(f"a b {options}", capsys)
    assert ended == status
    assert options or status or text.endswith("equal within 0.01: 100/100 iterations\n")


def test_a_later_launch_counts_and_a_torn_line_is_told(capsys: Printed) -> None:
    Path("a.log").write_text("iter 1: loss 2.0, x\niter 1: loss 3.0, x\n")
    Path("b.log").write_text("iter 1: loss 3.0, x\n")
    assert compare("a.log b.log", capsys)[0] == 0
    with Path("base/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 101, "lo')
    status, said = compare("base same", capsys)
    assert (status, "line 101 is torn" in said) == (0, True)


def test_what_cannot_be_compared_exits_with_2_naming_it(capsys: Printed) -> None:
    status, said = compare("base same absent", capsys)
    assert (status, "absent" in said) == (2, True)
    for target in ("absent/out.png", "out.unknown"):
        status, said = compare(f"base same --plot {target}", capsys)
        assert (status, target in said) == (2, True)
    for value in ("-1", "nan", "inf", "much"):
        with pytest.raises(SystemExit, match="2"):
            main(["a", "b", f"--rtol={value}"])


@pytest.mark.parametrize("words", ["base off", "base apart", "base same off short apart", "base same off"])
def test_a_plot_is_written_for_any_curves(capsys: Printed, words: str) -> None:
    pytest.importorskip("matplotlib")
    assert compare(f"{words} --plot out.png", capsys)[0] in (0, 1)
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_a_plot_fails_naming_the_extra(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for options, status in (([], 0), (["--plot", "out.png"], 2)):
        command = [sys.executable, str(SCRIPT), "base", "same", *options]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == status
        assert ("pip install matplotlib" in ended.stderr) == bool(status)


def make_logs(folder: str, **losses: float) -> None:
    Path(folder).mkdir()
    for name, loss in losses.items():
        text = "".join(f"step {n}/2 | train loss {loss + n:.6f} |\n" for n in (1, 2))
        Path(folder, f"{name}.log").write_text(text)


def test_two_folders_of_logs_are_compared_by_name(capsys: Printed) -> None:
    make_logs("a", gpt2=1.0, llama3_bfloat16=2.0)
    make_logs("b", gpt2=1.0, llama3_bfloat16=2.009)  # within the threshold of its dtype
    make_logs("c", gpt2=1.5, llama3_bfloat16=2.0)
    make_logs("d", gpt2=1.0)
    make_logs("e", llama3=1.0)
    for words, status, last in (
        ("a b", 0, "2 of 2 logs are equal"),
        ("a b --dtype float32", 1, "1 of 2 logs are equal"),
        ("a c", 1, "1 of 2 logs are equal"),
    ):
        ended, text = compare(words, capsys)
        assert (ended, text.splitlines()[-1]) == (status, last)
        assert "gpt2.log\n" in text
    assert json.loads(compare("a c --json", capsys)[1])["equal"] is False
    status, text = compare("a d", capsys)
    assert (status, "llama3_bfloat16.log is in a alone" in text) == (1, True)
    for words in ("d e", "a a d", "a a --plot x.png"):
        assert compare(words, capsys)[0] == 2
