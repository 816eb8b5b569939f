"""A link with the name of an iteration is no checkpoint of the run, for everything that looks into its folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import reprise
from reprise.errors import CheckpointError
from reprise.saving.policy import Retention, SavePolicy
from tests.harness import all_files
from tests.messages import Printed, refused
from tests.unit.reprise.loading.test_reader import load, save
from tests.unit.reprise.saving.test_checkpointer import folders_in, saved, started
from trainer.commands import checkpoint as script


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with iterations 10, 20 and 30, of which the last lies elsewhere and is a link."""
    folder = tmp_path / "run"
    for iteration in (10, 20, 30):
        path = save(folder, iteration)
    elsewhere = tmp_path / "elsewhere30" / path.name
    elsewhere.parent.mkdir()
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return folder


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_newest_iteration_that_is_a_link_is_refused(run: Path, is_dangling: bool, capsys: Printed) -> None:
    link, elsewhere = run / "iter_0000030", run.with_name("elsewhere30")
    if is_dangling:
        shutil.rmtree(elsewhere)
    with refused(CheckpointError, str(link), str(elsewhere)):
        load(run)
    with refused(CheckpointError, "iter_0000030", "10, 20"):
        load(run, 30)
    assert load(run, 20)[0] == 20
    before = folders_in(run)
    for command, status in (("ls", script.BAD), ("verify", script.BAD), ("show", 2), ("prune --keep 1", 2)):
        assert script.main([*command.split(), str(run)]) == status
        printed = capsys.readouterr()
        lines = [line for line in (printed.out + printed.err).splitlines() if "a link to" in line]
        assert lines
        assert all("iter_0000010" not in line for line in lines)
    assert folders_in(run) == before
    for iteration in (10, 20):
        shutil.rmtree(run / f"iter_00000{iteration}")
    with refused(CheckpointError, str(link)):
        reprise.load(run, torch.nn.Linear(2, 2), missing_ok=True)


def test_an_older_link_is_named_in_a_line_and_left_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(run, 40)
    assert load(run)[0] == 40
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING and "is a link" in r.getMessage()]
    assert f"{run / 'iter_0000030'}: it is a link to" in record.getMessage()
    before = all_files(run.with_name("elsewhere30"))
    assert script.main(["prune", "--keep", "1", str(run)]) == script.FINE
    assert folders_in(run) == ["iter_0000030", "iter_0000040"]
    assert (run / "iter_0000030").is_symlink()
    assert all_files(run.with_name("elsewhere30")) == before


def test_a_path_that_somebody_names_is_followed(run: Path) -> None:
    assert load(run / "iter_0000030")[0] == 30
    for command in ("verify", "show"):
        assert script.main([command, str(run / "iter_0000030")]) == script.FINE


def test_a_rewind_moves_a_link_and_leaves_its_target(run: Path) -> None:
    elsewhere = run.with_name("elsewhere30")
    before = all_files(elsewhere)
    with started(SavePolicy(run, retention=Retention(1))) as checkpointer:
        checkpointer.rewind(20)
        saved(checkpointer, 30)
        saved(checkpointer, 40)
    assert (run / "iter_0000030.superseded-1").is_symlink()
    assert folders_in(run) == ["iter_0000030.superseded-1", "iter_0000040"]
    assert all_files(elsewhere) == before


def test_a_save_that_meets_a_link_keeps_it_as_superseded(run: Path) -> None:
    elsewhere = run.with_name("elsewhere30")
    before = all_files(elsewhere)
    with started(SavePolicy(run)) as checkpointer:
        saved(checkpointer, 30)
    assert (run / "iter_0000030.superseded-1").readlink() == elsewhere / "iter_0000030"
    assert all_files(elsewhere) == before
    assert not list(run.glob(".*"))
