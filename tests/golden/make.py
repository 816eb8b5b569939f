"""Writes the golden checkpoint: `python -m tests.golden.make FOLDER`, into a folder that is not there yet.

What lies in `format1/` was written once and is never written again: it shows that version 1 of the format stays
readable. A new version of the format gets a folder of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch

from reprise.format import STATE, StoredDtype, TensorKind, TensorSpec
from reprise.ranks import StoreChannel
from reprise.saving import Checkpointer, SavePolicy, plan
from reprise.storage import Json
from reprise.tensors import Contents, stored_dtype, torch_dtype
from tests.fakes import Axis, Sharding, all_ranks

ITERATION = 7
FILE_BYTES = 1000  # two files of weights
SHARDING = Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2)))
ALIASES = {"head.weight": "embed.weight"}
PARAMETERS = {"embed.weight": (20, 8), "attn.weight": (8, 24), "norm.weight": (8,)}
VIEWS = {"attn.weight": (8, 3, 8)}
BUFFERS = {"norm.scale": ((7,), torch.bfloat16), "norm.flags": ((3,), torch.bool), "count": ((), torch.int64)}
USER: Json = {"note": "größer", "list": [1, None, 0.5]}
DOCUMENT: Json = {
    "format": "reprise/1",
    "iteration": ITERATION,
    "user": USER,
    "optimizer": {"name": "AdamW"},
    "groups": [{"names": list(PARAMETERS), "numbers": {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125}}],
}


def specs() -> list[TensorSpec]:
    """Return every tensor of the checkpoint in model order."""

    def like(kind: TensorKind, prefix: str) -> list[TensorSpec]:
        return [
            TensorSpec(kind, prefix + name, shape, StoredDtype.F32, VIEWS.get(name, shape))
            for name, shape in PARAMETERS.items()
        ]

    found = like(TensorKind.MODEL, "")
    found += [
        TensorSpec(TensorKind.MODEL, name, shape, stored_dtype(dtype, where=name), shape)
        for name, (shape, dtype) in BUFFERS.items()
    ]
    found += like(TensorKind.OPTIMIZER, "exp_avg.") + like(TensorKind.OPTIMIZER, "exp_avg_sq.")
    found += [TensorSpec(TensorKind.OPTIMIZER, f"step.{name}", (), StoredDtype.F32, ()) for name in PARAMETERS]
    return found


def values() -> dict[str, torch.Tensor]:
    """Return every tensor by name: multiples of 1/64 that a formula gives, exact in every dtype but bool."""
    state = {}
    for number, spec in enumerate(specs()):
        index = torch.arange(spec.total_bytes // spec.dtype.itemsize, dtype=torch.float64)
        flat = (index * 37 + number * 11) % 251 - 125
        dtype = torch_dtype(spec.dtype)
        if dtype.is_floating_point:
            flat = flat / 64
        state[spec.name] = (flat % 2 == 0 if dtype is torch.bool else flat.to(dtype)).reshape(spec.shape)
    return state


def write(folder: Path, sharding: Sharding = SHARDING) -> Path:
    """Write the checkpoint below `folder` through the library, its ranks being threads; return its path."""

    def call(channel: StoreChannel) -> Path:
        checkpointer = Checkpointer(SavePolicy(folder, file_bytes=FILE_BYTES), channel, nonce="golden")
        checkpointer.start()
        live = tuple(sharding.live(channel.rank, specs(), values()))
        report = checkpointer.save(ITERATION, Contents(tuple(specs()), live, ALIASES, {STATE: DOCUMENT}))
        checkpointer.close()
        assert report is not None
        if report.error is not None:
            raise report.error
        return report.path

    # So that tensors of a few hundred bytes are cut into shares as large ones are.
    with patch.object(plan, "SMALL_BYTES", 64):
        return all_ranks(sharding.world_size, call)[0]


def main(target: Path) -> None:
    """Write `target/iter_0000007`, and neither lock nor tracker."""
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        path = write(Path(scratch))
        path.rename(target / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
