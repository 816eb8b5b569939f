"""Runs that many tests look at: each is trained once, by the first of the processes that run the tests."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import launch, run_ok
from tests.resume.random_tokens import write_random_tokens
from tests.resume.starts import REFERENCE


def trained_once(factory: pytest.TempPathFactory, name: str, train: Callable[[Path], object]) -> Path:
    """Return the folder of a run that `train` makes, in the folder of all processes that run the tests."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "is_trained").exists():
            train(folder / "run")
            (folder / "is_trained").touch()
    return folder / "run"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of `REFERENCE`, which no test changes."""
    return trained_once(tmp_path_factory, "reference", lambda run: run_ok(run, REFERENCE))


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, killed after iterations 3 and 7, whose last output is in `last.log`; no test changes it."""

    def train(run: Path) -> None:
        for saved in (2, 6):
            assert launch(run, REFERENCE, kill_after=saved + 1, saved=saved).statuses == (-9,)
        run.with_name("last.log").write_text(run_ok(run, REFERENCE).text)

    return trained_once(tmp_path_factory, "killed", train)


@pytest.fixture
def run(reference: Path, tmp_path: Path) -> Path:
    """Return a copy of the reference run that a test may change."""
    return Path(shutil.copytree(reference, tmp_path / "run"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with the files of `random_tokens`."""
    write_random_tokens(tmp_path)
    return tmp_path
