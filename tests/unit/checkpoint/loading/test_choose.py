"""What a path to load from means: one iteration, or a run whose newest is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.checkpoint import load, save
from trainer.checkpoint.loading.choose import Chooser, LoadSource
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import is_iteration_name
from trainer.errors import CheckpointError


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
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        pick(path)


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_step_asked_of_one_iteration_is_refused_by_option(tmp_path: Path, iteration: int) -> None:
    path = save(tmp_path, nn.Linear(2, 2), iteration=3)
    for named in (path, path.rename(tmp_path / "best")):
        if named.exists():
            with pytest.raises(CheckpointError, match=rf"checkpoint\.ckpt_step={iteration}"):
                pick(named, iteration)
