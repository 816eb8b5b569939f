"""The programs in `examples/`: killed and run again, each ends with the figures and files of an unbroken run."""

from __future__ import annotations

import builtins
import importlib.util
import random
import runpy
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.harness import call_on_ranks, started, tensor_files

EXAMPLES = ROOT / "examples"
RANKS = {"plain_loop": 1, "whole_loop": 1, "pipeline": 2}
SLOW = {"nested_state": 1, "fsdp2": 2, "ddp_batchnorm": 2, "hf_trainer": 1, "accelerate_loop": 2}
NEED_ACCELERATE = ("hf_trainer", "accelerate_loop")
ITERATIONS, KILLED_AFTER = 12, 7
TIMEOUT_S = 300.0
OF_ENGINES = ("corpus", "fabric_loop", "ray_train")  # which tests/engines/ runs


def run_example(arguments: list[str]) -> None:
    """Run an example as a program, and stand still for good after it has printed an iteration, if one is named."""
    name, folder, last = arguments
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    sys.argv = [name, folder]
    show = builtins.print

    def show_and_stop(*values: Any, **given: Any) -> None:
        show(*values, **given)
        while values[:1] == (int(last),):
            signal.pause()

    builtins.print = show_and_stop
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def lines_of(text: str) -> dict[int, str]:
    """Return the figures that a rank has printed, by iteration."""
    found = [line.split(maxsplit=1) for line in text.splitlines() if line.split(" ")[0].isdigit()]
    return {int(iteration): "".join(rest) for iteration, *rest in found}


def run_whole(name: str, folder: Path, ranks: int) -> list[dict[int, str]]:
    arguments = [name, str(folder), "0"]
    ended = call_on_ranks(run_example, arguments, folder=folder, ranks=ranks, timeout_s=TIMEOUT_S)
    assert ended.ok, ended.text
    return [lines_of(output) for output in ended.outputs]


def run_until_killed(name: str, folder: Path, ranks: int) -> list[dict[int, str]]:
    arguments = [name, str(folder), str(KILLED_AFTER)]
    with started(run_example, arguments, folder=folder, ranks=ranks) as running:
        while not (any(folder.glob("iter_*")) and all(map(has_stopped, running.outputs))):
            assert not wait([process.sentinel for process in running.processes], 0.01), running.ended().text
        for rank in range(ranks):
            running.send(rank, signal.SIGKILL)
        running.join(TIMEOUT_S)
    return [lines_of(output) for output in running.ended().outputs]


def has_stopped(output: Path) -> bool:
    return output.exists() and KILLED_AFTER in lines_of(output.read_text())


def check(name: str, folder: Path, ranks: int) -> None:
    whole = run_whole(name, folder / "whole", ranks)
    assert all(list(lines) == list(range(1, ITERATIONS + 1)) for lines in whole)
    assert "0x" in whole[-1][ITERATIONS]
    killed = run_until_killed(name, folder / "killed", ranks)
    resumed = run_whole(name, folder / "killed", ranks)
    for before, after, expected in zip(killed, resumed, whole, strict=True):
        assert max(before) == KILLED_AFTER
        assert min(after) in (3, 5, 7)  # after the newest checkpoint; that of iteration 6 may have been under way
        assert {**before, **after} == expected
        assert all(after.get(iteration, line) == line for iteration, line in before.items())
    last = f"iter_{ITERATIONS:07d}"
    assert tensor_files(folder / "killed" / last) == tensor_files(folder / "whole" / last)


@pytest.mark.parametrize(("name", "ranks"), RANKS.items())
def test_an_example_resumes_bitwise(tmp_path: Path, name: str, ranks: int) -> None:
    check(name, tmp_path, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), SLOW.items())
def test_a_further_example_resumes_bitwise(tmp_path: Path, name: str, ranks: int) -> None:
    if name in NEED_ACCELERATE and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed, which the Trainer of transformers needs too")
    check(name, tmp_path, ranks)


def test_every_example_is_short_listed_and_tested() -> None:
    programs = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert programs.keys() == {*RANKS, *SLOW, *OF_ENGINES}
    listed = (EXAMPLES / "README.md").read_text()
    for name, text in programs.items():
        assert len(text.splitlines()) < 60, name
        assert f"[{name}.py]({name}.py)" in listed
