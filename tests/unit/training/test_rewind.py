"""The checkpoint to go back to after a spike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from reprise.format import DEFAULT_FILE_BYTES, FORMAT, STATE, StoredDtype, TensorKind, TensorSpec, build_layout
from reprise.ranks import single_rank_channel
from reprise.saving import write_checkpoint
from reprise.storage import FILE_SYSTEM, CheckpointFolder
from trainer.config.compose import compose
from trainer.interop.tensor_files import write_tensor_files
from trainer.launch.process_group import Cluster
from trainer.metrics.spikes import Spike
from trainer.training.rewind import Rewind, newest_before

LAYOUT = build_layout([TensorSpec(TensorKind.MODEL, "w", (2,), StoredDtype.F32, (2,))], file_bytes=DEFAULT_FILE_BYTES)


def saved(root: Path, *iterations: int) -> CheckpointFolder:
    folder = CheckpointFolder(root, FILE_SYSTEM)
    for iteration in iterations:
        document = {"format": FORMAT, "iteration": iteration, "consumed_samples": 10 * iteration}
        write_checkpoint(
            folder,
            iteration,
            LAYOUT,
            lambda target: write_tensor_files(target, FILE_SYSTEM, LAYOUT, lambda _: torch.zeros(2)),
            documents={STATE: document},
            aliases={},
        )
    return folder


def test_the_way_back_is_to_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    shared, host = saved(tmp_path / "shared", 10), saved(tmp_path / "host", 12, 14, 20)
    cluster = Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test")

    def newest(iteration: int, *, is_shared: bool) -> tuple[int, int]:
        local = SimpleNamespace(survey=lambda: None, paths=lambda: [*map(host.iteration, (20, 14, 12))])
        saves: Any = SimpleNamespace(shared=shared if is_shared else None, host_folders=local)
        return newest_before(saves, cluster, iteration)

    assert newest(18, is_shared=True) == (14, 140)
    assert newest(21, is_shared=False) == (20, 200)
    assert newest(12, is_shared=True) == (10, 100)
    assert newest(12, is_shared=False) == (-1, 0)
    (host.iteration(14) / STATE).unlink()
    assert newest(18, is_shared=True) == (12, 120)
    saved(tmp_path / "shared", 9_999_999, 10_000_000)
    assert newest(10_000_001, is_shared=True) == (10_000_000, 100_000_000)


def test_adapters_keep_the_base_of_their_command() -> None:
    words = ["model=gpt2_tiny", "model.lora.rank=4", "checkpoint.load=/base", "checkpoint.finetune=true"]
    config = compose(words)
    for _ in range(2):
        config = Rewind(8, Spike(10, "loss", 9.0, 3.0), ((96, 120),)).config(config)
        section = config.checkpoint
        assert (section.load, section.ckpt_step, section.finetune, section.base) == ("auto", 8, False, "/base")
