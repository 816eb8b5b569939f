"""Dropout over tensor, sequence and pipeline parallelism: resumes, recomputation and replicas keep their bits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from reprise.format.manifest import digest_of
from reprise.tensors import is_dtensor, memory_of
from tests.harness import TINY, built, call_on_ranks, compose, curve, filled, run_ok, tensor_files
from trainer.launch import process_group as launch
from trainer.training.loop import train

_TP, _SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
_PP = "parallel.pipeline_model_parallel_size=2"
AXES = {"tp2": (2, (_TP,)), "tp2+sp": (2, (_TP, _SP)), "pp2": (2, (_PP,)), "tp2+sp pp2": (4, (_TP, _SP, _PP))}
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    "train.micro_batch_size=6",
    "train.train_iters=6",
    "checkpoint.save_interval=3",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "tp2+sp" else pytest.mark.slow) for n in AXES])
def test_a_resume_and_recomputation_keep_the_bits(tmp_path: Path, name: str) -> None:
    ranks, axes = AXES[name]
    run_ok(tmp_path / "plain", [*BASE, *axes], ranks=ranks)
    again = [*BASE, *axes, f"checkpoint.load={tmp_path}/plain/checkpoints/iter_0000003"]
    run_ok(tmp_path / "resumed", [*again, "train.activation_checkpointing=true"], ranks=ranks)
    assert curve(tmp_path / "resumed") == curve(tmp_path / "plain")[3:]
    last = "checkpoints/iter_0000006"
    assert tensor_files(tmp_path / "resumed" / last) == tensor_files(tmp_path / "plain" / last)


def _train_and_digest(arguments: list[str]) -> None:
    """Train, then write the digest of every parameter that all tensor-parallel ranks hold whole."""
    output, *overrides = arguments
    config = compose(overrides)
    cluster = launch.start("cpu", deterministic=False)
    run = built(config, cluster)
    run = filled(run)
    train(run)
    replicated = {
        name: digest_of(memory_of(parameter.detach()))
        for part in run.state.parts
        for name, parameter in part.model.named_parameters()
        if not is_dtensor(parameter)
    }
    Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(replicated))
    launch.shutdown(cluster)


def test_tensor_parallel_replicas_stay_equal_under_dropout(tmp_path: Path) -> None:
    overrides = [*BASE, _TP, f"run.dir={tmp_path}/run", "checkpoint.save=null", "checkpoint.save_interval=0"]
    arguments = [str(tmp_path / "digests"), *overrides]
    ended = call_on_ranks(_train_and_digest, arguments, folder=tmp_path / "ranks", ranks=2)
    assert ended.ok, ended.text
    first, second = (json.loads((tmp_path / f"digests.{rank}").read_text()) for rank in range(2))
    assert "transformer.h.0.ln_1.weight" in first
    assert "transformer.wpe.weight" in first
    assert first == second


def test_masks_differ_only_where_ranks_hold_different_parts() -> None:
    """Seen from the sites: heads always lie on different ranks, residuals only under sequence parallelism."""
    from models.build import build_model
    from models.layers import Dropout
    from trainer.parallel.tensor import shards_of_dropout

    model = build_model(compose([*BASE]).model)
    sites = {name for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert shards_of_dropout(model, sequence_parallel=False) == {s for s in sites if s.endswith("attn_dropout")}
    assert shards_of_dropout(model, sequence_parallel=True) == sites - {"dropout"}
