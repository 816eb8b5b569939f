"""The command that runs the tests of a device: one table, whatever a file of tests does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cuda import __main__ as battery

TESTS = """
import os

import pytest

def test_good():
    assert os.environ["CUDA_TEST_SECONDS"]

def test_bad():
    assert 1 == 2, "the reason"

@pytest.mark.skip(reason="no need")
def test_skipped():
    pass

def test_fatal():
    os._exit(3)

def test_later():
    pass
"""


def test_a_file_that_dies_leaves_the_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.cuda.conftest import *\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    out = tmp_path / "out/of/the/run"
    monkeypatch.setenv("OUT", str(out))
    assert battery.main(["--marker", "not cuda", str(tmp_path / "test_some.py")]) == 1
    found = json.loads((out / "test-cuda.json").read_text())
    rows = {row["test"]: (row["result"], row["reason"]) for row in found["tests"]}
    assert rows == {
        "test_good": ("passed", ""),
        "test_bad": ("failed", "AssertionError: the reason"),
        "test_skipped": ("skipped", "no need"),
        "test_fatal": ("failed", "did not end: pytest ended with status 3"),
        "test_later": ("skipped", "left out: pytest ended with status 3"),
    }
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("- 1 passed, 2 failed, 2 skipped in ")
    assert any("| test_some | test_bad" in line for line in shown)
    assert (out / "test-cuda.test_some.log").exists()


def test_a_file_that_collects_nothing_is_a_failure_of_its_own(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    (row,) = battery.results("test_some.py", records, "killed when the time was over")
    assert (row["test"], row["result"], row["reason"]) == ("all", "failed", "killed when the time was over")
    records.write_text('{"collected": ["a.py::test_one"]}\n{"test": "a.py::test_one", "result": "passed", "seco')
    (row,) = battery.results("test_some.py", records, "killed")
    assert (row["test"], row["result"]) == ("test_one", "skipped")


def test_a_fixture_that_fails_after_its_test_counts(tmp_path: Path) -> None:
    line = {"test": "a.py::test_one", "seconds": 1.0, "reason": ""}
    lines = [{"collected": ["a.py::test_one"]}, {**line, "result": "passed"}, {**line, "result": "failed"}]
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (row,) = battery.results("a.py", records, "")
    assert row["result"] == "failed"


def test_every_file_of_tests_of_a_device_is_run() -> None:
    files = battery._parser().parse_args([]).files
    assert battery.ALONE in files
    marked = {path.name for path in battery.HERE.glob("test_*.py") if 'cuda"' in path.read_text()}
    assert marked - {"test_battery.py"} <= {path.name for path in files}
