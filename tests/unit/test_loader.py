"""A state saved at any sharding is the same bytes, and loads at any other sharding to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fakes import SHARDINGS, Sharding, all_ranks, sample_specs, sample_state
from trainer.checkpoint.board import Board
from trainer.checkpoint.checkpointer import Checkpointer, SavePolicy, SaveReport
from trainer.checkpoint.choose import Source
from trainer.checkpoint.layout import Kind, Place, TensorSpec
from trainer.checkpoint.live import Contents
from trainer.checkpoint.loader import LoadReport, check_tensors
from trainer.checkpoint.manifest import BLOCK_BYTES
from trainer.checkpoint.reader import FORMAT, STATE
from trainer.errors import MismatchError

SPECS = sample_specs()
STATE_OF = sample_state(SPECS, seed=7)
DOCUMENT = {STATE: {"format": FORMAT, "iteration": 10}}
IDS = [sharding.name for sharding in SHARDINGS]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save(folder: Path, sharding: Sharding) -> list[SaveReport | None]:
    def call(board: Board) -> SaveReport | None:
        checkpointer = Checkpointer(SavePolicy(folder, file_bytes=1 << 20), board, nonce="n")
        checkpointer.start()
        live = tuple(sharding.live(board.rank, SPECS, STATE_OF))
        report = checkpointer.save(10, Contents(tuple(SPECS), live, {}, DOCUMENT))
        checkpointer.close()
        return report

    return all_ranks(sharding.world_size, call)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the state once at every sharding."""
    folders = {}
    for sharding in SHARDINGS:
        folder = tmp_path_factory.mktemp("run")
        for report in save(folder, sharding):
            assert report is not None
            assert report.error is None, str(report.error)
        folders[sharding.name] = folder / "iter_0000010"
    return folders


@pytest.mark.parametrize("sharding", SHARDINGS[1:], ids=IDS[1:])
def test_every_sharding_saves_the_same_bytes(saved: dict[str, Path], sharding: Sharding) -> None:
    first, other = saved["one rank"], saved[sharding.name]
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert sum(name.suffix == ".safetensors" for name in names) > 2
    for name in names:
        if name.name != "manifest.json":
            assert (first / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("target", SHARDINGS, ids=IDS)
@pytest.mark.parametrize("source", SHARDINGS, ids=IDS)
def test_every_sharding_loads_at_every_other(saved: dict[str, Path], source: Sharding, target: Sharding) -> None:
    empty = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS}

    def call(board: Board) -> LoadReport:
        checkpointer = Checkpointer(SavePolicy(None), board, nonce="n")
        live = target.live(board.rank, SPECS, empty)
        _, report = checkpointer.restore(Source(saved[source.name]), check=lambda _: None, live=lambda _: live)
        for found, expected in zip(live, target.live(board.rank, SPECS, STATE_OF), strict=True):
            assert bits(found.local) == bits(expected.local), found.spec.name
        return report

    total = sum(spec.total_bytes for spec in SPECS)
    for rank, report in enumerate(all_ranks(target.world_size, call)):
        assert (report.tensors, report.expected) == (len(SPECS), len(SPECS))
        assert report.read_bytes <= total
        own = sum(len(bits(tensor.local)) for tensor in target.live(rank, SPECS, STATE_OF))
        if source == target:
            assert report.read_bytes == own
        if {axis.role for axis in source.axes + target.axes} <= {"row", "replica", "strided row"}:
            edges = 2 * sum(1 for spec in SPECS if spec.total_bytes)
            assert report.read_bytes <= own + edges * BLOCK_BYTES


def test_a_shard_that_is_not_contiguous_in_memory_is_filled(saved: dict[str, Path]) -> None:
    whole = SHARDINGS[0].live(0, SPECS, STATE_OF)
    live = []
    for tensor in whole:
        local = torch.zeros(tensor.local.shape, dtype=tensor.local.dtype)
        live.append(replace(tensor, local=local.T.contiguous().T if local.ndim == 2 else local))

    def call(board: Board) -> None:
        checkpointer = Checkpointer(SavePolicy(None), board, nonce="n")
        checkpointer.restore(Source(saved["rows over 3"]), check=lambda _: None, live=lambda _: live)

    all_ranks(1, call)
    assert not live[0].local.is_contiguous()
    for found, expected in zip(live, whole, strict=True):
        assert bits(found.local) == bits(expected.local), found.spec.name


def test_check_tensors_lists_every_difference_in_one_message() -> None:
    def spec(name: str, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> TensorSpec:
        return TensorSpec(Kind.MODEL, name, shape, dtype, shape)

    there = [spec("same"), spec("shape"), spec("dtype"), spec("both"), spec("extra")]
    places = {s.name: Place(s, "model.safetensors", 4096) for s in there}
    moment = TensorSpec(Kind.OPTIMIZER, "exp_avg.same", (2,), torch.float32, (2,))
    places[moment.name] = Place(moment, "optimizer/x", 4096)
    wanted = [
        spec("same"), spec("shape", (3, 2)), spec("dtype", dtype=torch.bfloat16),
        spec("both", (6,), torch.float16), spec("gone"),
    ]  # fmt: skip
    with pytest.raises(MismatchError) as caught:
        check_tensors(wanted, places, where="some/iter_0000001")
    assert "some/iter_0000001" in str(caught.value)
    assert str(caught.value.found).split("; ") == [
        "shape has shape [2, 3], the model has [3, 2]",
        "dtype has dtype torch.float32, the model has torch.bfloat16",
        "both has shape [2, 3], the model has [6]",
        "both has dtype torch.float32, the model has torch.float16",
        "gone is missing",
        "extra is unexpected",
    ]
    check_tensors(there, places, where="x")


def test_check_tensors_says_how_many_more_there_are() -> None:
    specs = [TensorSpec(Kind.MODEL, f"t{i}", (1,), torch.float32, (1,)) for i in range(50)]
    with pytest.raises(MismatchError, match="and 30 more"):
        check_tensors(specs, {}, where="x")
