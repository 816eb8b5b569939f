"""`latest`, and loads that may find nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from reprise import latest, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from tests.messages import refused


def test_latest_is_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None
    save(tmp_path, nn.Linear(2, 2), iteration=9)
    path = save(tmp_path, nn.Linear(2, 2), iteration=10)
    (tmp_path / ".iter_0000011.a.partial").mkdir()
    (tmp_path / "iter_0000012").write_text("a file")
    assert latest(str(tmp_path)) == path == tmp_path / "iter_0000010"


@pytest.mark.parametrize("is_there", [False, True])
def test_a_load_may_find_no_checkpoint(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "checkpoints"
    if is_there:
        folder.mkdir()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    assert load(folder, model, missing_ok=True) == {"iteration": 0}
    assert load_state_dict(folder, {"model": dict(model.state_dict())}, missing_ok=True) == {"iteration": 0}
    assert torch.equal(model.weight, before)
    with refused(CheckpointError, str(folder)):
        load(folder, model)


@pytest.mark.parametrize("name", [".metadata", "metadata.pkl", "step-3/.metadata"])
@pytest.mark.parametrize("missing_ok", [False, True])
def test_a_folder_of_another_program_is_named(tmp_path: Path, name: str, missing_ok: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    if missing_ok:  # the table's name alone tells nothing
        assert load(tmp_path, nn.Linear(2, 2), missing_ok=True) == {"iteration": 0}
    for file in ("__0_0.distcp", "model_0.pt"):
        (tmp_path / name).with_name(file).touch()
    with refused(CheckpointError, f"reprise convert import dcp {(tmp_path / name).parent} "):
        load(tmp_path, nn.Linear(2, 2), missing_ok=missing_ok)


def test_an_iteration_is_loaded_by_its_number(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for iteration in (1, 2):
        save(tmp_path, model, iteration=iteration)
    assert load(tmp_path, model, iteration=1) == {"iteration": 1}
    assert load_state_dict(tmp_path, {"model": dict(model.state_dict())}, iteration=1) == {"iteration": 1}
    with refused(CheckpointError, "one of 1, 2"):
        load(tmp_path, model, iteration=3)


def test_missing_ok_loads_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    path = save_state_dict(tmp_path, {"model": dict(model.state_dict())}, iteration=4)
    for place in (tmp_path, path):
        assert load(place, other, missing_ok=True)["iteration"] == 4
        assert torch.equal(other.weight, model.weight)


def test_missing_ok_refuses_damage_files_and_links(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save(tmp_path, model, iteration=1)
    (path / "manifest.json").write_text("{")
    with refused(CheckpointError, str(tmp_path)):
        load(tmp_path, model, missing_ok=True)
    with refused(CheckpointError, "manifest.json"):
        load(path / "manifest.json", model, missing_ok=True)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "iter_0000001").symlink_to(path)
    with refused(CheckpointError, "linked"):
        load(linked, model, missing_ok=True)
