"""`reprise.show`: state, files and tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import reprise
from reprise import TensorSummary
from reprise.errors import CheckpointError
from tests.local_folders import save_on_two_hosts


def test_the_newest_checkpoint_is_shown_with_its_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False, dtype=torch.bfloat16))
    tied = nn.ModuleDict({"a": model, "b": model})
    for iteration in (1, 2):
        path = reprise.save(tmp_path, tied, iteration=iteration, state={"epoch": iteration})
    contents = reprise.show(tmp_path)
    assert (contents.path, contents.iteration, contents.share) == (path, 2, None)
    assert contents.state["state_dict"]["values"] == {"/epoch": 2}
    assert contents.tensors == (
        TensorSummary("a.0.weight", "F32", (2, 3), 24, "model.safetensors"),
        TensorSummary("a.1.weight", "BF16", (2, 3), 12, "model.safetensors"),
    )
    assert contents.aliases == {"b.0.weight": "a.0.weight", "b.1.weight": "a.1.weight"}
    assert {file.name: file.total_bytes for file in contents.files}["model.safetensors"] == (
        path / "model.safetensors"
    ).stat().st_size
    assert reprise.show(tmp_path / "iter_0000001").iteration == 1


def test_the_folder_of_a_host_has_its_share(tmp_path: Path) -> None:
    a, _ = save_on_two_hosts(tmp_path, 2)
    share = reprise.show(a).share
    assert share is not None
    assert [host.present for host in share.hosts] == [3, 0]


def test_damage_is_raised(tmp_path: Path) -> None:
    path = reprise.save(tmp_path, nn.Linear(1, 1), iteration=1)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError):
        reprise.show(tmp_path)
