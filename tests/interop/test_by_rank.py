"""Folders with a file for each rank go on here as they would have in their program. Their pickles run no code."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reprise.errors import CheckpointError, MismatchError, TrainerError
from tests.harness import call_on_ranks, run_ok
from tests.interop import states
from tests.interop.dcp_producers import SAVED, by_rank_job, overrides_of
from tests.interop.states import assert_carried, opened, weights_of
from tests.interop.test_dcp import assert_same, losses_of
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.torch_file import read_records

OURS, STATE = states.overrides_of("gpt2"), states.state_of("gpt2")
ABSENT = importlib.util.find_spec("torch_checkpointing") is None
PACKAGE = pytest.mark.skipif(ABSENT, reason="torch_checkpointing is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "family"),
    [
        ("transformers", "llama"),  # its writer refuses tied ends
        pytest.param("torch_checkpointing", "gpt2", marks=[pytest.mark.nightly, PACKAGE]),
    ],
)
def test_two_ranks_of_fsdp2_go_on_here(tmp_path: Path, program: str, family: str) -> None:
    overrides = overrides_of(family)
    saved, losses = tmp_path / "saved", tmp_path / "losses.json"
    arguments = [program, family, str(saved), str(losses)]
    ended = call_on_ranks(by_rank_job, arguments, folder=tmp_path / "job", ranks=2, timeout_s=180)
    assert ended.ok, ended.text
    arguments = ["import", "dcp", str(saved), str(tmp_path / "checkpoints"), "--trust-pickle", *overrides]
    assert convert.main(arguments) == 0
    run_ok(tmp_path, overrides)
    assert_same(losses_of(tmp_path), json.loads(losses.read_text()))


# ---- torch_checkpointing's form, as its 0.1.1 writes it


def placed(shape: list[int]) -> dict[str, Any]:
    """Return what the table says of a tensor on four ranks: a matrix under FSDP2 over tensor parallelism, or copies."""
    mesh = {"device_type": "cpu", "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3), "mesh_dim_names": None}
    cuts = [{"type": "StridedShard", "dim": 0, "split_factor": 2}, {"type": "Shard", "dim": 0}]
    placements = cuts if len(shape) == 2 else [{"type": "Replicate"}] * 2
    data = {"global_shape": shape, "dtype": "torch.float32", "stride": None, "mesh_spec": mesh}
    packed = {"type": "DTensorShardingMetadata", "data": {**data, "placements": placements}}
    return {"sharding_metadata": packed, "ranks": (0, 1, 2, 3)}


def write(folder: Path) -> Path:
    """Write `STATE` from four ranks."""
    folder.mkdir()
    model = weights_of(STATE)
    moments = {name: {kind: STATE.read(f"{kind}.{name}") for kind in (*states.MOMENTS, "step")} for name in model}
    table: dict[str, Any] = {}
    for item, value in {"model": model, "optimizer": {"state": moments}}.items():
        entries: dict[str, Any] = {}

        def part(value: Any, keys: tuple[str, ...], rank: int, entries: dict[str, Any] = entries) -> Any:
            if isinstance(value, dict):
                return {key: part(member, (*keys, key), rank) for key, member in value.items()}
            entries[json.dumps(keys)] = [placed(list(value.shape))]
            return value.chunk(2)[rank % 2].chunk(2)[rank // 2].clone() if value.ndim == 2 else value.clone()

        for rank in range(4):
            torch.save(part(value, (), rank), folder / f"{item}_{rank}.pt")
        table[item] = {"nested_path_to_metadata": entries, "rank_to_layout_info": dict.fromkeys(range(4))}
    torch.save({"step": torch.tensor(SAVED)}, folder / "train_state_0.pt")
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"metadata": table, "world_size": 4, "version": "2.0"}))
    return folder


def test_every_tensor_of_four_ranks_comes_in(tmp_path: Path) -> None:
    assert_carried(opened("dcp", write(tmp_path / "in"), OURS), STATE)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        table = read_records(folder / "metadata.pkl")
        change(table)
        (folder / "metadata.pkl").write_bytes(pickle.dumps(table))

    return edit


def entry(table: dict[str, Any]) -> dict[str, Any]:
    return table["metadata"]["model"]["nested_path_to_metadata"]['["transformer.wpe.weight"]'][0]


def halved(folder: Path) -> None:
    content = torch.load(folder / "model_1.pt")
    content["transformer.wpe.weight"] = content["transformer.wpe.weight"][:1]
    torch.save(content, folder / "model_1.pt")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (edited(lambda table: table.update(version="3.0")), "version 3.0"),
    "another placement": (edited(lambda table: entry(table)["sharding_metadata"].update(type="jagged")), "jagged"),
    "a rank less": (edited(lambda table: entry(table).update(ranks=(0,))), "its chunks hold"),
    "a file elsewhere": (
        edited(lambda table: table["metadata"].update({"../x": table["metadata"]["model"]})),
        "../x",
    ),
    "a file missing": (lambda folder: (folder / "optimizer_1.pt").unlink(), "optimizer_1.pt"),
    "a part of another shape": (halved, "transformer.wpe.weight"),
    "no table": (lambda folder: (folder / "metadata.pkl").unlink(), "resharder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    change, words = DAMAGE[damage]
    change(write(tmp_path / "in"))
    with refused((CheckpointError, MismatchError), words):
        states.read_all(opened("dcp", tmp_path / "in", OURS))


def test_an_untrusted_table_is_not_opened(tmp_path: Path) -> None:
    with refused(TrainerError, "--trust-pickle"):
        opened("dcp", write(tmp_path / "in"), OURS, trusts_pickle=False)


def test_parts_of_transformers_come_without_moments(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rank in range(2):
        weights = {name: value.chunk(2)[rank].clone() for name, value in weights_of(STATE).items()}
        starts = {name: rank * len(value.chunk(2)[0]) for name, value in weights_of(STATE).items()}
        offsets = {n: {"saved_offsets": [starts[n], *[0] * (w.ndim - 1)]} for n, w in weights.items()}
        file = tmp_path / f"in/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(weights, file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    source = opened("dcp", tmp_path / "in", OURS, trusts_pickle=False)
    assert not source.has_optimizer
    assert_carried(source, STATE)
