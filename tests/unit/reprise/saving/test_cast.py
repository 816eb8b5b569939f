"""Saves of the weights alone: copies in another dtype, in a folder with its own lock."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from reprise.format.names import FORMAT, STATE
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.tensors.live import Contents
from tests.fakes import lone_contents

VALUES = torch.linspace(-3.0, 5.0, 2000).reshape(50, 40)


def started(root: Path, nonce: str = "n") -> Checkpointer:
    policy = SavePolicy(root / "weights", async_save=True, dtype=torch.bfloat16)
    found = Checkpointer(policy, single_rank_channel(), nonce=nonce)
    found.start()
    return found


def contents(values: torch.Tensor, iteration: int) -> Contents:
    return lone_contents({"w": values}, {STATE: {"format": FORMAT, "iteration": iteration}})


def saved(root: Path, iteration: int) -> torch.Tensor:
    return load_file(root / "weights" / f"iter_{iteration:07d}" / "model.safetensors")["w"]


def test_later_changes_reach_neither_this_save_nor_the_next(tmp_path: Path) -> None:
    weights, values = started(tmp_path), VALUES.clone()
    given = contents(values, 2)
    assert weights.save(2, given) is None
    values.add_(1.0)  # with no optimizer that would wait
    assert weights.save(4, given) is None
    values.zero_()
    weights.close()
    assert weights.results.last_error is None
    assert torch.equal(saved(tmp_path, 2), VALUES.to(torch.bfloat16))
    assert torch.equal(saved(tmp_path, 4), (VALUES + 1.0).to(torch.bfloat16))


def test_what_is_there_is_not_saved_again(tmp_path: Path) -> None:
    weights = started(tmp_path)
    weights.save(2, contents(VALUES, 2))
    weights.save(4, contents(VALUES, 4))
    weights.close()
    again = started(tmp_path, nonce="m")
    again.rewind(2)
    again.find_saved(2)
    again.save(2, contents(VALUES, 2))
    again.close()
    names = sorted(path.name for path in (tmp_path / "weights").iterdir() if path.is_dir())
    assert names == ["iter_0000002", "iter_0000004.superseded-1"]
