"""`reprise.show`: state, files and tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import reprise
from reprise import TensorSummary


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
