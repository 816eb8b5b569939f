"""With `parallel.invariant_ranks` a run has the same bits on any number of ranks, ZeRO stage and pipeline.

Every run starts afresh; its losses, norms, rates, evaluations and tensor files are compared with those of one rank, or
with tensor parallelism those of its own ranks alone. The soak runs every topology that four ranks can have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.harness import TINY, curve, launch, tensor_files

TP = "parallel.tensor_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
PP = "parallel.pipeline_model_parallel_size=2"
COPIES = "parallel.replicate=2"
VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"

# Sizes that nothing divides: 257 tokens, a width of 20. Lanes of 3 micro batches where there are 4.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model=gpt2_tiny", "model.dropout=0.1", "parallel.invariant_ranks=4", "train.global_batch_size=12"),
    "llama3": ("model=llama3_tiny", "model.n_kv_head=2", "parallel.invariant_ranks=8", "train.global_batch_size=8"),
}
BASE = (*TINY, "model.n_layer=4", "train.micro_batch_size=1", "train.eval_iters=2", "checkpoint.save_interval=0")


@dataclass(frozen=True, slots=True)
class Case:
    """A topology, with the overrides that make it."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()


def zero(stage: int) -> str:
    return f"parallel.zero_stage={stage}"


def pipelines(*, ranks: int, stage: int) -> list[Case]:
    suffix = f" dp2 zero{stage}" if ranks == 4 else ""
    return [Case("pp2" + suffix, ranks, (PP, zero(stage))), Case("pp2 vpp2" + suffix, ranks, (PP, VPP, zero(stage)))]


ALONE = Case("1", 1)
EVERY = [
    *(Case(f"dp{ranks} zero{stage}", ranks, (zero(stage),)) for ranks in (2, 4) for stage in range(4)),
    *(Case(f"dp4 zero{stage} in 2 copies", 4, (zero(stage), COPIES)) for stage in range(1, 4)),
    *pipelines(ranks=2, stage=1),
    *(case for stage in range(4) for case in pipelines(ranks=4, stage=stage)),
]
CUT = Case("tp2", 2, (TP,))
EVERY_CUT = [*(Case(f"tp2 dp2 zero{stage}", 4, (TP, zero(stage))) for stage in range(4)), Case("tp2 pp2", 4, (TP, PP))]
CUT_SEQUENCE = Case("tp2+sp", 2, (TP, SP))
EVERY_CUT_SEQUENCE = [Case(case.name.replace("tp2", "tp2+sp"), 4, (SP, *case.overrides)) for case in EVERY_CUT]

Outcome: TypeAlias = tuple[object, list[str], dict[str, bytes]]
Train: TypeAlias = Callable[..., Outcome]


def trainer_of(factory: pytest.TempPathFactory, base: Sequence[str]) -> Train:
    """Return a function that trains a case once and returns its curve, evaluations and tensor files.

    Args:
        base: overrides of every case.
    """

    @cache
    def train_once(case: Case, *overrides: str) -> Outcome:
        folder = factory.mktemp("run") / "run"
        ended = launch(folder, [*base, *overrides, *case.overrides], ranks=case.ranks, timeout_s=240.0)
        assert ended.ok, ended.text
        return outcome(folder)

    return train_once


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return trainer_of(tmp_path_factory, BASE)


def outcome(folder: Path) -> Outcome:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row["valid_loss_hex"] for row in rows if row.get("event") == "evaluation"]
    (last,) = (folder / "checkpoints").glob("iter_*")
    return curve(folder), evaluations, tensor_files(last)


def overrides_of(model: str, dtype: str, *, iterations: int) -> tuple[str, ...]:
    return (
        *MODELS[model],
        f"train.dtype={dtype}",
        f"train.train_iters={iterations}",
        f"train.eval_interval={iterations // 2}",
    )


def named(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases]


# The cases of the gate in float32; the soak has every case of every family.
GATED = {
    "gpt2": ("dp4 zero1", "dp4 zero3", "dp4 zero3 in 2 copies", "pp2 vpp2"),
    "llama3": ("dp2 zero0", "pp2 dp2 zero1"),
}


def chosen(*names: str) -> list[object]:
    return named([case for case in (*EVERY, *EVERY_CUT, *EVERY_CUT_SEQUENCE) if case.name in names])


@pytest.mark.parametrize(
    ("model", "case"),
    [
        pytest.param(model, case, id=f"{model}-{case.name}")
        for model, names in GATED.items()
        for case in (*EVERY, *EVERY_CUT)
        if case.name in names
    ],
)
def test_float32_has_the_bits_of_one_rank(train: Train, model: str, case: Case) -> None:
    overrides = overrides_of(model, "float32", iterations=6)
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.parametrize("case", chosen("dp2 zero1", "dp2 zero3", "pp2 dp2 zero2"))
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_has_the_bits_of_one_rank(train: Train, model: str, case: Case) -> None:
    overrides = overrides_of(model, "bfloat16", iterations=6)
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_ranks_have_their_own_bits(train: Train, dtype: str) -> None:
    overrides = overrides_of("gpt2", dtype, iterations=6)
    (case,) = (case for case in EVERY_CUT_SEQUENCE if case.name == "tp2+sp dp2 zero3")
    assert train(case, *overrides) == train(CUT_SEQUENCE, *overrides)


def test_products_with_a_vector_have_the_bits_of_one_rank(train: Train) -> None:
    """Kernels for them have other bits at other addresses: the parameters of one rank are aligned as gathered ones."""
    sizes = (
        "model.n_head=1",
        "model.n_embd=6",
        "model.intermediate_size=7",
        "model.vocab_size=260",
        "train.seq_length=1",
    )
    overrides = ("model=gpt2_tiny", *sizes, "model.n_layer=2", "parallel.invariant_ranks=2", "train.train_iters=4")
    (case,) = (case for case in EVERY if case.name == "dp2 zero1")
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.parametrize("case", chosen("dp2 zero3", "pp2"))
def test_qwen3_and_muon_have_the_bits_of_one_rank(train: Train, case: Case) -> None:
    family = ("model=qwen3_tiny", "model.n_kv_head=2", "optimizer=muon", "train.activation_checkpointing=true")
    overrides = (*family, "parallel.invariant_ranks=2", "train.train_iters=4")
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt2", "llama3"])
@pytest.mark.parametrize("name", ["dp2 zero3", "pp2"])
def test_compiled_models_have_the_bits_of_one_rank(train: Train, model: str, name: str) -> None:
    overrides = (*overrides_of(model, "bfloat16", iterations=4), "train.compile=true", "model.n_layer=2")
    (case,) = (case for case in EVERY if case.name == name)
    assert train(case, *overrides) == train(ALONE, *overrides)


def test_more_lanes_are_another_rounding(train: Train) -> None:
    overrides = overrides_of("llama3", "float32", iterations=6)
    assert train(ALONE, *overrides) != train(ALONE, *overrides, "parallel.invariant_ranks=2")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
def test_eight_ranks_have_the_bits_of_one(train: Train, stage: int) -> None:
    overrides = overrides_of("llama3", "bfloat16", iterations=30)
    assert train(Case("dp8", 8, (zero(stage),)), *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("case", named(EVERY))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_topology_has_the_bits_of_one_rank(train: Train, model: str, dtype: str, case: Case) -> None:
    overrides = overrides_of(model, dtype, iterations=30)
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("case", named(EVERY_CUT + EVERY_CUT_SEQUENCE))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_parallel_topology(train: Train, model: str, dtype: str, case: Case) -> None:
    overrides = overrides_of(model, dtype, iterations=30)
    assert train(case, *overrides) == train(CUT_SEQUENCE if SP in case.overrides else CUT, *overrides)
