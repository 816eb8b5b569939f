"""`reprise.show`: state, files and tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from reprise import FileSummary, TensorSummary, save, show


def test_the_newest_checkpoint_is_shown_with_its_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False, dtype=torch.bfloat16))
    save(tmp_path, model, iteration=1)
    path = save(tmp_path, nn.ModuleDict({"a": model, "b": model}), iteration=2)
    contents, name = show(tmp_path), "model.safetensors"
    assert (contents.path, contents.iteration, contents.share) == (path, 2, None)
    assert contents.tensors == (
        TensorSummary("a.0.weight", "F32", (2, 3), 24, name),
        TensorSummary("a.1.weight", "BF16", (2, 3), 12, name),
    )
    assert contents.aliases == {"b.0.weight": "a.0.weight", "b.1.weight": "a.1.weight"}
    assert FileSummary(name, (path / name).stat().st_size) in contents.files
    assert show(tmp_path / "iter_0000001").iteration == 1
