"""Writes the golden state dict: `python -m tests.golden.make_state_dict FOLDER`, into a folder that is not there yet.

What lies in `format1_state_dict/` was written once and is never written again: every later version loads it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from reprise import save_state_dict

ITERATION = 7


def state_dict(scale: int = 1) -> dict[str, Any]:
    """Return a state of every kind; another `scale` gives other tensors and values in the same places."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (scale * torch.arange(1, 1 + torch.Size(shape).numel())).reshape(shape).to(dtype)

    table = tensor(5, 4)
    moments = {name: {"exp_avg": tensor(5, 4), "step": tensor()} for name in ("table.weight", "layers.10.w")}
    groups = [{"params": list(moments), "lr": 0.5 * scale, "betas": (0.5, 0.25 * scale), "fused": None}]
    return {
        "model": {"table.weight": table, "layers.10.w": tensor(3), "layers.9.w": tensor(3), "head.weight": table},
        "optimizer": {"state": moments, "param_groups": groups},
        "ema": {"table.weight": tensor(5, 4, dtype=torch.bfloat16), "decay": 0.75 * scale},
        "other optimizer": {"state": {}, "param_groups": [{"params": ["w"], "lr": tensor(), "momentum": scale}]},
        "odd/na~me": [tensor(2, dtype=torch.int64), {"note": "é" * scale, "list": [scale, [None, True]]}],
        "epoch": 3 * scale,
    }


def main(target: Path) -> None:
    """Write `target/iter_0000007`, and neither lock nor tracker."""
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        path = save_state_dict(scratch, state_dict(), iteration=ITERATION)
        path.rename(target / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
