"""Dropout over tensor, sequence and pipeline parallelism: resumes, recomputation and replicas keep their bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import TINY, compose, curve, run_ok, tensor_files
from tests.profiles import nightly, slow

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


@pytest.mark.parametrize("name", [nightly(n) if n == "tp2+sp pp2" else slow(n) if "pp2" in n else n for n in AXES])
def test_a_resume_and_recomputation_keep_the_bits(tmp_path: Path, name: str) -> None:
    ranks, axes = AXES[name]
    run_ok(tmp_path / "plain", [*BASE, *axes], ranks=ranks)
    again = [*BASE, *axes, f"checkpoint.load={tmp_path}/plain/checkpoints/iter_0000003"]
    run_ok(tmp_path / "resumed", [*again, "train.activation_checkpointing=true"], ranks=ranks)
    assert curve(tmp_path / "resumed") == curve(tmp_path / "plain")[3:]
    last = "checkpoints/iter_0000006"
    assert tensor_files(tmp_path / "resumed" / last) == tensor_files(tmp_path / "plain" / last)


def test_masks_differ_only_where_ranks_hold_different_parts() -> None:
    """Seen from the sites: heads always lie on different ranks, residuals only under sequence parallelism."""
    from models.build import build_model
    from models.layers import Dropout
    from trainer.parallel.tensor import shards_of_dropout

    model = build_model(compose([*BASE]).model)
    sites = {name for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert shards_of_dropout(model, sequence_parallel=False) == {s for s in sites if s.endswith("attn_dropout")}
    assert shards_of_dropout(model, sequence_parallel=True) == sites - {"dropout"}
