"""A tied embedding whose two ends lie on different pipeline stages: two live copies of equal bits, one on disk."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from safetensors import safe_open

from reprise.errors import CheckpointError
from tests.harness import TINY, built, call_on_ranks, compose, filled, tensor_files
from trainer.launch import process_group as launch
from trainer.optim import offloaded_average
from trainer.run.parallelize import check_tied_copies
from trainer.training.loop import train

LAST = 10
TIED = "transformer.wte.weight"
NAMES = {TIED, f"exp_avg.{TIED}", f"exp_avg_sq.{TIED}", f"step.{TIED}"}
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "optimizer.weight_decay=0.1",
    f"train.train_iters={LAST}",
    "parallel.pipeline_model_parallel_size=2",
)


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's part of a tensor: rows from `first` on, and the digest of their bytes."""

    rank: int
    first: int
    shape: tuple[int, ...]
    digest: str
    is_copy: bool


def _train_and_digest(arguments: list[str]) -> None:
    """Bring the run to its end, or load its end, and write down what this rank then holds of the tied tensors."""
    output, *overrides = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    config = compose(overrides)
    cluster = launch.start("cpu", deterministic=False)
    run = built(config, cluster)
    run = filled(run)
    train(run)
    found = [
        (
            tensor.spec.name,
            tensor.box.offset[0] if tensor.box.offset else 0,
            tensor.box.shape,
            xxhash.xxh3_64_hexdigest(tensor.local.contiguous().numpy().tobytes()),
            tensor.is_copy,
        )
        for tensor in run.state.shards()
        if tensor.spec.name in NAMES
    ]
    Path(f"{output}.{cluster.rank}").write_text(json.dumps(found))
    run.saves.close()
    launch.shutdown(cluster)


def _held(folder: Path, label: str, *extra: str, ranks: int) -> tuple[dict[str, list[Held]], str]:
    """Run the command on `folder`; return who holds what of each tied tensor, and rank 0's output."""
    output = folder.with_name(label)
    arguments = [str(output), f"run.dir={folder}", *BASE, *extra]
    ended = call_on_ranks(_train_and_digest, arguments, folder=folder, ranks=ranks, timeout_s=240.0)
    assert ended.ok, ended.text
    found: dict[str, list[Held]] = {name: [] for name in NAMES}
    for rank in range(ranks):
        for name, first, shape, digest, is_copy in json.loads(Path(f"{output}.{rank}").read_text()):
            found[name].append(Held(rank, first, tuple(shape), digest, is_copy))
    return found, ended.outputs[0]


def _check_copies(held: dict[str, list[Held]], iteration: Path, *, ranks: int) -> None:
    """Check that both ends hold the bytes that are on disk, and that these are no zeros."""
    files = sorted(iteration.rglob("*.safetensors"))
    for name, parts in held.items():
        assert [part.rank for part in parts] == list(range(ranks)), name
        # Half of the ranks are the first stage, the other half the last.
        assert [part.is_copy for part in parts] == [rank >= ranks // 2 for rank in range(ranks)], name
        stored = []
        for file in files:
            with safe_open(file, "numpy") as reader:
                assert "lm_head.weight" not in " ".join(reader.keys())
                stored += [reader.get_tensor(name)] if name in reader.keys() else []  # noqa: SIM118
        assert len(stored) == 1, name
        assert stored[0].any(), name
        for part in parts:
            ours = stored[0] if not part.shape else stored[0][part.first : part.first + part.shape[0]]
            assert ours.shape == part.shape, name
            assert xxhash.xxh3_64_hexdigest(ours.tobytes()) == part.digest, (name, part)


def _train_then_load(folder: Path, *extra: str, ranks: int) -> None:
    last = folder / f"checkpoints/iter_{LAST:07d}"
    trained, said = _held(folder, "trained", *extra, ranks=ranks)
    assert "starting fresh" in said
    _check_copies(trained, last, ranks=ranks)
    assert json.loads((last / "manifest.json").read_text())["aliases"] == {"lm_head.weight": TIED}
    files = tensor_files(last)

    loaded, said = _held(folder, "loaded", *extra, ranks=ranks)
    assert f"iteration {LAST} from" in said
    assert loaded == trained
    assert tensor_files(last) == files


def test_both_copies_have_equal_bits_after_training_and_a_load(tmp_path: Path) -> None:
    _train_then_load(tmp_path / "run", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_with_data_parallel_ranks_too(tmp_path: Path, zero_stage: int) -> None:
    _train_then_load(tmp_path / "run", f"parallel.zero_stage={zero_stage}", ranks=4)


def _spoil_one_copy(arguments: list[str]) -> None:
    """Check the copies as a save does, then again after one bit of a moment of the last stage's copy has changed."""
    run = built(compose(arguments), cluster := launch.start("cpu", deterministic=False))
    run = filled(run)
    check_tied_copies(run.state, run.context.embedding_group)
    print("equal at first")
    if cluster.rank == 1:
        part = run.state.parts[0]
        part.optimizer.state[part.model.lm_head.weight]["exp_avg"][3, 3] = 1e-30
    with pytest.raises(CheckpointError, match="The two copies of a tied parameter differ"):
        check_tied_copies(run.state, run.context.embedding_group)
    launch.shutdown(cluster)


def test_copies_that_differ_are_never_saved(tmp_path: Path) -> None:
    arguments = [*BASE, "checkpoint.save=null", "checkpoint.save_interval=0", f"run.dir={tmp_path}/run"]
    ended = call_on_ranks(_spoil_one_copy, arguments, folder=tmp_path / "run", ranks=2, timeout_s=60.0)
    assert ended.ok, ended.text
    assert all("equal at first" in output for output in ended.outputs)


@dataclass(frozen=True, slots=True)
class _Thread:
    """Calls a function at once, or, as a thread that has no core, only when its result is asked for."""

    is_late: bool

    def submit(self, function: Callable[..., None], *arguments: object, **named: object) -> SimpleNamespace:
        call = partial(function, *arguments, **named)
        return SimpleNamespace(result=call if self.is_late else partial(list, [call()]))


def _train_with_late_averages(arguments: list[str]) -> None:
    """Train and save while the last stage's averages lag behind its steps, and compare the copies once more."""
    cluster = launch.start("cpu", deterministic=False)
    offloaded_average.ThreadPoolExecutor = lambda *_, **__: _Thread(is_late=cluster.rank == 1)
    run = filled(built(compose(arguments), cluster))
    train(run)
    check_tied_copies(run.state, run.context.embedding_group)
    run.saves.close()
    launch.shutdown(cluster)


def test_copies_are_compared_after_the_moves_of_averages(tmp_path: Path) -> None:
    averages = ["train.ema_decay=0.9", "train.ema_offload=true"]
    arguments = [*BASE, *averages, "checkpoint.save_interval=2", "train.train_iters=4", f"run.dir={tmp_path}/run"]
    arguments.remove(f"train.train_iters={LAST}")
    ended = call_on_ranks(_train_with_late_averages, arguments, folder=tmp_path / "run", ranks=2, timeout_s=120.0)
    assert ended.ok, ended.text
