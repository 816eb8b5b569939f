"""The plugin of Lightning's Trainer: which checkpoint a path means."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.errors import CheckpointError
from tests.engines.programs import needs


@needs("pytorch_lightning")
def test_a_path_is_a_folder_or_a_name_of_a_checkpoint(tmp_path: Path) -> None:
    io = importlib.import_module("examples.lightning_trainer").CheckpointIO(max_checkpoint_keep=2)
    for step in (1, 2, 4):
        weight = torch.tensor([float(step)])
        checkpoint: dict[str, Any] = {"global_step": step, "optimizer_states": [{"state": {0: weight}}]}
        io.save_checkpoint(checkpoint, tmp_path / f"epoch=0-step={step}.ckpt")
        weight.zero_()
        io.remove_checkpoint(tmp_path / f"epoch=0-step={step}.ckpt")
    for path, step in ((tmp_path / "epoch=0-step=2.ckpt", 2), (tmp_path / "iter_0000002", 2), (tmp_path, 4)):
        loaded = io.load_checkpoint(path)
        assert (loaded["global_step"], loaded["optimizer_states"][0]["state"][0].item()) == (step, step)
    with pytest.raises(CheckpointError):
        io.load_checkpoint(tmp_path / "epoch=0-step=1.ckpt")
    io.teardown()
    io.save_checkpoint({"global_step": 6}, tmp_path / "last.ckpt")
    io.teardown()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
