"""`reprise.diff`: what it returns and when it calls. `commands/test_checkpoint.py` has the differences."""

from __future__ import annotations

from pathlib import Path

import torch

import reprise


def save(folder: Path, **state: object) -> Path:
    reprise.save_state_dict(folder, state, iteration=1)
    return folder


def test_checkpoints_of_the_same_state_have_no_difference(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, w=torch.full((2,), torch.nan), epoch=1) for name in "ab")
    counts: list[tuple[int, int]] = []
    difference = reprise.diff(a, b, progress=lambda _, count, total: counts.append((count, total)))
    assert (difference.is_empty, difference.equal_tensors, difference.state) == (True, 1, ())
    assert counts == [(0, 1), (1, 1)]
