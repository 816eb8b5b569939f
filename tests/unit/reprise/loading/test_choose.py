"""What a path to load from means: one iteration, or a run whose newest is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from reprise import load, save
from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.format.lineage import FRESH, LINEAGE, Branch, Lineage
from reprise.format.names import FORMAT, STATE
from reprise.loading.choose import Chooser, LoadSource, LoadTerms
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files
from reprise.storage.folder import is_iteration_name
from tests.fakes import lone_contents
from tests.messages import refused


def pick(path: Path, iteration: int | None = None) -> Path:
    return Chooser(LoadSource(path, iteration), Files(), lambda _: None).pick()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("iter_0000010", True),
        ("iter_10000000", True),
        ("iter_0000010.superseded-1", True),
        ("iter_0000010.superseded-12", True),
        ("iter_000010", False),
        ("iter_0000010.superseded-", False),
        ("iter_0000010.superseded", False),
        ("iter_0000010.backup", False),
        ("iter_0000010\n", False),
        (".iter_0000010.n-1.partial", False),
        ("iter_", False),
        ("iter_search_7", False),
        ("", False),
    ],
)
def test_an_iteration_folder_is_told_by_its_whole_name(name: str, is_one: bool) -> None:
    assert is_iteration_name(name) is is_one


@pytest.mark.parametrize("name", ["iter_search_7", "iter_", "iter_0000010.backup", "runs"])
def test_a_run_folder_may_have_any_other_name(tmp_path: Path, name: str) -> None:
    for iteration in (1, 2):
        save(tmp_path / name, nn.Linear(2, 2), iteration=iteration)
    assert pick(tmp_path / name) == tmp_path / name / "iter_0000002"
    assert pick(tmp_path / name, 1) == tmp_path / name / "iter_0000001"


@pytest.mark.parametrize("name", ["iter_0000010.superseded-2", "best", "iter_0000010.backup"])
def test_a_folder_with_a_manifest_is_an_iteration_by_any_name(tmp_path: Path, name: str) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path, source, iteration=10).rename(tmp_path / name)
    assert load(tmp_path / name, target)["iteration"] == 10
    assert torch.equal(source.weight, target.weight)


def test_a_superseded_folder_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000010.superseded-2"
    path.mkdir()
    with refused(CheckpointError, str(path), "manifest.json"):
        pick(path)


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_step_asked_of_one_iteration_is_refused_by_option(tmp_path: Path, iteration: int) -> None:
    path = save(tmp_path, nn.Linear(2, 2), iteration=3)
    for name in (path.name, "best"):
        with refused(CheckpointError, str(iteration)):
            pick(path.rename(tmp_path / name), iteration)
        path = tmp_path / name


TERMS = LoadTerms("--from", "--step", "begin anew")


def test_advice_names_what_the_caller_has_set(tmp_path: Path) -> None:
    one = save(tmp_path / "run", nn.Linear(2, 2), iteration=3)
    (tmp_path / "empty").mkdir()
    for source, words in (
        (LoadSource(tmp_path / "none", terms=TERMS), ["--from"]),
        (LoadSource(tmp_path / "empty", terms=TERMS), ["--from"]),
        (LoadSource(tmp_path / "run", 4, TERMS), ["--step"]),
        (LoadSource(one, 4, TERMS), ["--step", "--from"]),
        (LoadSource(tmp_path / "none"), ["path"]),
    ):
        with refused(CheckpointError, *words):
            Chooser(source, Files(), lambda _: None).pick()


def test_a_reason_of_several_checkpoints_is_given_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, nn.Linear(2, 2), iteration=iteration)
    for iteration in (1, 3):
        (tmp_path / f"iter_000000{iteration}" / "manifest.json").unlink()
    (tmp_path / "iter_0000002" / "model.safetensors").unlink()
    caplog.clear()
    with refused(TrainerError, "iter_0000003, iter_0000001: ", "iter_0000002: ", "begin anew"):
        Chooser(LoadSource(tmp_path, terms=TERMS), Files(), lambda _: None).pick()
    assert caplog.text == ""


def save_of(folder: Path, iteration: int, lineage: Lineage) -> None:
    """Save an iteration of a run with this lineage."""
    state = {STATE: {"format": FORMAT, "iteration": iteration, LINEAGE: lineage.record()}}
    saver = Checkpointer(SavePolicy(folder), single_rank_channel(), nonce=f"n{iteration}")
    saver.start()
    saver.save(iteration, lone_contents({"w": torch.ones(3)}, state))
    saver.close()


RUN = Lineage((Branch("a", FRESH),))


def test_a_branch_that_was_given_up_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (2, 4, 6):
        save_of(tmp_path, iteration, RUN)
    now = Lineage((*RUN.branches, Branch("b", 4)))
    source = LoadSource(tmp_path, lineage=now)
    assert Chooser(source, Files(), lambda _: None).pick() == tmp_path / "iter_0000004"
    assert "iter_0000006 is skipped" in caplog.text
    named = LoadSource(tmp_path, 6, lineage=now)
    with refused(CheckpointError, "iter_0000006"):
        Chooser(named, Files(), lambda _: None).pick()


def test_a_checkpoint_of_another_run_stops_the_start(tmp_path: Path) -> None:
    save_of(tmp_path, 2, RUN)
    source = LoadSource(tmp_path, lineage=Lineage((Branch("x", FRESH),)))
    with refused(MismatchError, "run x", "run a", "run.json"):
        Chooser(source, Files(), lambda _: None).pick()


def test_where_all_were_given_up_no_repair_is_advised(tmp_path: Path) -> None:
    save_of(tmp_path, 2, RUN)
    source = LoadSource(tmp_path, lineage=Lineage((*RUN.branches, Branch("b", FRESH))))
    with refused(CheckpointError, "run.json") as caught:
        Chooser(source, Files(), lambda _: None).pick()
    assert "Repair" not in str(caught.value)
