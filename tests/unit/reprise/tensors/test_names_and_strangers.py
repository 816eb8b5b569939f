"""A checkpoint is what its name says, and nobody else's loader reads something else from its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from tests.messages import refused
from tests.unit.reprise.loading.test_reader import load, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with iterations 10 and 20."""
    for iteration in (10, 20):
        save(tmp_path, iteration)
    return tmp_path


def test_a_copy_named_after_another_iteration_is_skipped(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(run / "iter_0000020", run / "iter_0000100")
    assert load(run)[0] == 20
    assert "iter_0000100 is skipped: The checkpoint folder's name does not match its iteration" in caplog.text
    for named in ((run, 100), (run / "iter_0000100", None)):
        with refused(CheckpointError, "iteration 100", "iteration 20"):
            load(*named)


def test_a_superseded_folder_of_another_iteration_is_refused(run: Path) -> None:
    (run / "iter_0000020").rename(run / "iter_0000100.superseded-1")
    with refused(CheckpointError, "iteration 100"):
        load(run / "iter_0000100.superseded-1")
