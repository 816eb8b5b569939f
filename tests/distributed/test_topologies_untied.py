"""Losses over topologies where GPT-2 has an output layer of its own, LLaMA-3 a tied one, or dropout draws masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch

pytestmark = pytest.mark.slow

_TP = "parallel.tensor_model_parallel_size=2"
_SP = "parallel.sequence_parallel=true"
_PP = "parallel.pipeline_model_parallel_size=2"
_VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"

FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt2-untied": ("model=gpt2_tiny", "model.tie_word_embeddings=false"),
    "llama3-tied": ("model=llama3_tiny", "model.tie_word_embeddings=true"),
}
SPREADS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2+sp pp2 dp2": (8, (_TP, _SP, _PP)),
    "tp2 dp2 zero3": (4, (_TP, "parallel.zero_stage=3")),
    "pp2 vpp2": (2, (_PP, _VPP)),
}
ITERATIONS = 20


def _run(folder: Path, family: str, extra: Sequence[str], *, ranks: int) -> list[tuple[int, str, str, str, int]]:
    sizes = ("model.n_layer=5", f"train.train_iters={ITERATIONS}", "checkpoint.save=null", "checkpoint.save_interval=0")
    ended = launch(folder, [*FAMILIES[family], *TINY, *sizes, *extra], ranks=ranks, timeout_s=240.0)
    assert ended.ok, ended.text
    return curve(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.nightly
def test_losses_over_20_iterations_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    one = _run(tmp_path / "1", family, (), ranks=1)
    assert [row[0] for row in one] == list(range(1, ITERATIONS + 1))
    for name, (ranks, extra) in SPREADS.items():
        found = _run(tmp_path / name.replace(" ", "_").replace("+", "_"), family, extra, ranks=ranks)
        # float32 sums in another order: units in the last place of a loss of 5.5, carried on by twenty steps.
        assert [float.fromhex(r[1]) for r in found] == pytest.approx([float.fromhex(r[1]) for r in one], abs=1e-5), name
        assert [float.fromhex(r[2]) for r in found] == pytest.approx([float.fromhex(r[2]) for r in one], rel=1e-4), name
        assert [(r[0], r[3], r[4]) for r in found] == [(r[0], r[3], r[4]) for r in one], name


def test_pipeline_stages_draw_the_masks_of_one_rank(tmp_path: Path) -> None:
    dropout = "model.dropout=0.1"
    one = _run(tmp_path / "1", "gpt2-untied", [dropout], ranks=1)
    plain = _run(tmp_path / "plain", "gpt2-untied", [], ranks=1)
    assert abs(float.fromhex(one[0][1]) - float.fromhex(plain[0][1])) > 1e-4  # other masks would show
    for name, extra in {"pp2": (_PP,), "pp2_vpp2": (_PP, _VPP)}.items():
        found = _run(tmp_path / name, "gpt2-untied", [dropout, *extra], ranks=2)
        # Sums in another order, as above.
        assert [float.fromhex(r[1]) for r in found] == pytest.approx([float.fromhex(r[1]) for r in one], abs=1e-5), name
