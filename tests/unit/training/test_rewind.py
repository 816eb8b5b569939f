"""The checkpoint to go back to after a spike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from reprise.format import DEFAULT_FILE_BYTES, FORMAT, STATE, StoredDtype, TensorKind, TensorSpec, build_layout
from reprise.ranks import StoreChannel
from reprise.saving import write_checkpoint
from reprise.storage import FILE_SYSTEM, CheckpointFolder
from tests.fakes import all_ranks
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


def test_the_way_back_is_to_a_checkpoint_that_every_host_has(tmp_path: Path) -> None:
    shared = saved(tmp_path / "shared", 10)
    hosts = [saved(tmp_path / "a", 12, 14, 16, 20), saved(tmp_path / "b", 12, 14, 20)]

    def newest(iteration: int, *, is_shared: bool) -> list[tuple[int, int]]:
        def of(channel: StoreChannel) -> tuple[int, int]:
            local = SimpleNamespace(folder=hosts[channel.rank])
            saves: Any = SimpleNamespace(shared=shared if is_shared else None, host_folders=local)
            return newest_before(
                saves,
                Cluster(channel.rank, 2, torch.device("cpu"), 1, channel, "test"),
                iteration,
            )

        return all_ranks(2, of)

    assert newest(18, is_shared=True) == [(14, 140)] * 2  # host b lacks 16
    assert newest(21, is_shared=False) == [(20, 200)] * 2
    assert newest(12, is_shared=True) == [(10, 100)] * 2
    assert newest(12, is_shared=False) == [(-1, 0)] * 2
    (hosts[0].iteration(14) / STATE).unlink()
    assert newest(18, is_shared=True) == [(12, 120)] * 2


def test_adapters_keep_the_base_of_their_command() -> None:
    words = ["model=gpt2_tiny", "model.lora.rank=4", "checkpoint.load=/base", "checkpoint.finetune=true"]
    config = compose(words)
    for _ in range(2):
        config = Rewind(8, Spike(10, "loss", 9.0, 3.0), ((96, 120),)).config(config)
        section = config.checkpoint
        assert (section.load, section.ckpt_step, section.finetune, section.base) == ("auto", 8, False, "/base")


def test_a_rewind_that_a_kill_repeats_is_recorded_once(tmp_path: Path) -> None:
    notes = list[tuple[int, str]]()
    log = SimpleNamespace(note=lambda iteration, event, *_: notes.append((iteration, event)))
    run: Any = SimpleNamespace(spikes=[], logs=[log], config=SimpleNamespace(run=SimpleNamespace(dir=tmp_path)))
    rewind = Rewind(8, Spike(10, "loss", 9.0, 3.0), ((0, 4), (96, 120)))
    line, record = {"iteration": 8, "loss": 1.0}, {"iteration": 8, "event": "rewind", "from": 10, "skipped": [96, 120]}
    for last, count in ((record | {"skipped": [0, 4]}, 1), (record, 1), (record | {"iteration": 4}, 2)):
        rows = [record, line, last, {"iteration": 8, "event": "save"}]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        rewind.begin(run)
        assert len(notes) == count
    assert notes[0] == (8, "rewind")
