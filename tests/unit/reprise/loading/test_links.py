"""A link with the name of an iteration is no checkpoint of the run, for everything that looks into its folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.saving.policy import Retention, SavePolicy
from tests.harness import all_files
from tests.messages import refused
from tests.unit.reprise.loading.test_reader import load, save
from tests.unit.reprise.saving.test_checkpointer import contents, folders_in, saved, started
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
def test_a_newest_iteration_that_is_a_link_is_refused(run: Path, is_dangling: bool) -> None:
    if is_dangling:
        shutil.rmtree(run.with_name("elsewhere30"))
    with refused(CheckpointError, str(run / "iter_0000030"), str(run.with_name("elsewhere30"))):
        load(run)


def test_an_older_link_is_named_in_a_line_and_left_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(run, 40)
    assert load(run)[0] == 40
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING and "is a link" in r.getMessage()]
    assert f"{run / 'iter_0000030'}: it is a link to" in record.getMessage()
    assert (run / "iter_0000030").is_symlink()


def test_ckpt_step_refuses_a_link_and_takes_another_iteration(run: Path) -> None:
    with refused(CheckpointError, "iter_0000030", "10, 20"):
        load(run, 30)
    assert load(run, 20)[0] == 20


def test_a_path_that_somebody_names_is_followed(run: Path) -> None:
    assert load(run / "iter_0000030")[0] == 30
    assert script.main(["verify", str(run / "iter_0000030")]) == script.FINE
    assert script.main(["show", str(run / "iter_0000030")]) == script.FINE


def test_a_rewind_moves_a_link_and_leaves_its_target(run: Path) -> None:
    elsewhere = run.with_name("elsewhere30")
    before = all_files(elsewhere)
    checkpointer = started(SavePolicy(run, retention=Retention(1)))
    checkpointer.rewind(20)
    saved(checkpointer, 30)
    saved(checkpointer, 40)
    checkpointer.close()
    assert (run / "iter_0000030.superseded-1").is_symlink()
    assert folders_in(run) == ["iter_0000030.superseded-1", "iter_0000040"]
    assert all_files(elsewhere) == before


def test_a_save_that_meets_a_link_names_it_and_blames_no_disk(run: Path) -> None:
    checkpointer = started(SavePolicy(run))
    before = all_files(run.with_name("elsewhere30"))
    report = checkpointer.save(30, contents(30))
    assert report is not None
    text = str(report.error)
    assert str(run / "iter_0000030") in text
    assert str(run.with_name("elsewhere30")) in text
    assert "room" not in text
    assert "disk" not in text
    assert all_files(run.with_name("elsewhere30")) == before
    assert not list(run.glob(".*"))
    (run / "iter_0000030").unlink()
    saved(checkpointer, 30)
    checkpointer.close()


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_command_calls_no_link_valid(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([command, str(run)]) == script.BAD
    linked = [line for line in capsys.readouterr().out.splitlines() if "a link to" in line]
    assert linked
    assert all("elsewhere30" in line and "iter_0000010" not in line for line in linked)


@pytest.mark.parametrize("command", [["show"], ["prune", "--keep", "1"]])
def test_a_command_that_needs_the_newest_refuses_a_link(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = folders_in(run)
    assert script.main([*command, str(run)]) == script.IMPOSSIBLE
    assert "iter_0000030" in capsys.readouterr().err
    assert folders_in(run) == before


def test_prune_leaves_an_older_link_and_what_it_leads_to(run: Path) -> None:
    save(run, 40)
    before = all_files(run.with_name("elsewhere30"))
    assert script.main(["prune", "--keep", "1", str(run)]) == script.FINE
    assert folders_in(run) == ["iter_0000030", "iter_0000040"]
    assert (run / "iter_0000030").is_symlink()
    assert all_files(run.with_name("elsewhere30")) == before
