"""The exit status and the JSON of `reprise compare-steps`, without a run that is trained again."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import Printed
from tests.unit.compare.test_curves import record
from trainer.commands.compare_steps import main
from trainer.commands.frame import BAD, IMPOSSIBLE
from trainer.steps import search
from trainer.steps.replay import RecordedRun
from trainer.steps.search import StepReport, launch_replay


def make_record(folder: Path, iteration: int, loss: float) -> str:
    """Write the record of a rank with one number, and return its folder."""
    folder.mkdir()
    header = {"settings": {}, "ranks": 1, "stage": 0, "tensor_rank": 0}
    place = [iteration, "figures", -1, "loss", "value"]
    numbers = {"digest": loss.hex(), "at": None, "call": 0}
    number = {"place": place, "dtype": "float64", "shape": [], "offset": [], "tensor_shape": [], **numbers}
    (folder / "rank0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (header, number, {"end": True})))
    return str(folder)


def test_records_of_other_iterations_are_not_equal(tmp_path: Path, capsys: Printed) -> None:
    assert main([make_record(tmp_path / "a", 1, 2.0), make_record(tmp_path / "b", 2, 2.0)]) == IMPOSSIBLE
    for name, first in (("c", 1), ("d", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{record(first + n, 1.0)}\n" for n in range(2)))
    capsys.readouterr()
    assert main([str(tmp_path / "c"), str(tmp_path / "d")]) == IMPOSSIBLE
    assert str(tmp_path / "c") in capsys.readouterr().err


def test_a_difference_that_is_not_finite_is_json(tmp_path: Path, capsys: Printed) -> None:
    status = main([make_record(tmp_path / "a", 1, 2.0), make_record(tmp_path / "b", 1, math.nan), "--json"])
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (status, report["difference"]["largest"]) == (BAD, None)


def test_logs_that_neither_run_repeats_are_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    report = StepReport(None, None, first=(2, 2), unrepeated=((3,), (3,)))
    monkeypatch.setattr(search, "compare_steps", lambda *_, **options: report)
    assert main([str(tmp_path), str(tmp_path)]) == BAD
    assert "B does not reproduce: its log has different figures at iteration 3" in capsys.readouterr().out


def test_an_interrupt_ends_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, processes = tmp_path / "python", list[subprocess.Popen[str]]()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)

    def interrupt(process: subprocess.Popen[str]) -> None:
        processes.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch_replay(RecordedRun(tmp_path, 2, {}, {}), 0, 1, 1, tmp_path / "out", ())
    (process,) = processes
    assert process.returncode == -signal.SIGTERM
    assert "'-m', 'reprise', 'compare-steps'" in str(process.args), "only a checkout has `trainer`"
