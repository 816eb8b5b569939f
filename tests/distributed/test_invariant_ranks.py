"""With `parallel.invariant_ranks` a run has the same bits on any number of ranks, ZeRO stage and pipeline.

Every run starts afresh; its losses, norms, rates, evaluations and tensor files are compared with those of one rank, or
with tensor parallelism those of its own ranks alone. The nightly run has every topology of four ranks.

Each of these mutations alone makes some of the fast tests fail: lanes 1 and 2 of a rank exchanged, a ring in place of
the tree over ranks, dropout masks by rank, and a gradient norm added in the order of ranks.
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
from tests.profiles import nightly, slow

TP = "parallel.tensor_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
PP = "parallel.pipeline_model_parallel_size=2"
COPIES = "parallel.replicate=2"
VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"

# Sizes that nothing divides: 257 tokens, a width of 20. Lanes of 3 micro batches where there are 4.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model=gpt2_tiny", "model.dropout=0.1", "parallel.invariant_ranks=4", "train.global_batch_size=12"),
    "llama3": ("model=llama3_tiny", "model.n_kv_head=2", "parallel.invariant_ranks=8", "train.global_batch_size=8"),
    "qwen3 and muon": (
        *("model=qwen3_tiny", "model.n_kv_head=2", "optimizer=muon"),
        *("train.activation_checkpointing=true", "parallel.invariant_ranks=2"),
    ),
    "bfloat16 moments": (
        *("model=gpt2_tiny", "model.dropout=0.1", "parallel.invariant_ranks=4"),
        *("optimizer.moments_dtype=bfloat16", "train.ema_decay=0.9"),
    ),
    "muon and bfloat16 moments": (
        *("model=qwen3_tiny", "model.n_kv_head=2", "optimizer=muon", "optimizer.moments_dtype=bfloat16"),
        "parallel.invariant_ranks=4",
    ),
    # A stage without gradients, and a last one with some.
    "frozen": (
        *("model=gpt2_tiny", "model.dropout=0.1", "parallel.invariant_ranks=4"),
        "train.freeze=['transformer.w?e.weight','transformer.h.[01].*','transformer.h.3.ln_1.*']",
    ),
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


# Families, data types and topologies that the gate runs, that `make test-all` adds, and that the night adds.
GATE = [("gpt2", "float32", "dp4 zero1"), ("gpt2", "float32", "pp2 vpp2"), ("llama3", "bfloat16", "dp2 zero3")]
SLOW = [
    ("gpt2", "float32", "dp4 zero3 in 2 copies"),
    ("gpt2", "bfloat16", "pp2 dp2 zero2"),
    ("frozen", "float32", "dp2 zero3"),
    ("frozen", "bfloat16", "pp2 dp2 zero1"),
    ("bfloat16 moments", "float32", "dp2 zero0"),
    ("bfloat16 moments", "float32", "dp4 zero2"),
    ("qwen3 and muon", "float32", "dp2 zero3"),
]
NIGHTLY = [
    ("frozen", "float32", "pp2 vpp2"),
    ("bfloat16 moments", "float32", "dp2 zero1"),
    ("bfloat16 moments", "float32", "dp4 zero3"),
    ("qwen3 and muon", "float32", "pp2"),
]


def case_of(name: str) -> Case:
    (case,) = (case for case in (ALONE, *EVERY, *EVERY_CUT, *EVERY_CUT_SEQUENCE) if case.name == name)
    return case


@pytest.mark.parametrize(
    ("model", "dtype", "name"), [*GATE, *(slow(*row) for row in SLOW), *(nightly(*row) for row in NIGHTLY)]
)
def test_a_topology_has_the_bits_of_one_rank(train: Train, model: str, dtype: str, name: str) -> None:
    overrides = overrides_of(model, dtype, iterations=6)
    assert train(case_of(name), *overrides) == train(ALONE, *overrides)


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
    assert train(case_of("dp2 zero1"), *overrides) == train(ALONE, *overrides)


def test_more_lanes_are_another_rounding(train: Train) -> None:
    overrides = overrides_of("llama3", "float32", iterations=6)
    assert train(ALONE, *overrides) != train(ALONE, *overrides, "parallel.invariant_ranks=2")


def test_threads_that_follow_the_cores_are_named(tmp_path: Path) -> None:
    lanes = "parallel.invariant_ranks=2"
    base = ["model=gpt2_tiny", *BASE, "train.train_iters=1", "schedule.lr_warmup_iters=0"]
    for number, words in enumerate(([lanes], [lanes, "train.threads=1"], [])):
        ended = launch(tmp_path / str(number), [*base, *words])
        assert ended.ok, ended.text
        line = f"train.threads is 0, so each rank uses its share of the host's cores: {lanes} keeps the bits only"
        assert (line in ended.text) == (words == [lanes])


def killed_and_moved(run: Path, overrides: Sequence[str], topologies: Sequence[Case]) -> Outcome:
    """Return what a run leaves that is killed twice, each time an iteration after a save, and goes on elsewhere."""
    words = [*overrides, "checkpoint.save_interval=2", "checkpoint.reshard=true", "checkpoint.max_checkpoint_keep=1"]
    for saved, case in zip((2, 4), topologies, strict=False):
        ended = launch(run, [*words, *case.overrides], ranks=case.ranks, kill_after=saved + 1, saved=saved)
        assert set(ended.statuses) == {-9}, ended.text
    ended = launch(run, [*words, *topologies[2].overrides], ranks=topologies[2].ranks)
    assert "iteration 4 from" in ended.outputs[0], ended.text
    return outcome(run)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("bfloat16 moments", ("dp2 zero3", "1", "pp2")),
        pytest.param("muon and bfloat16 moments", ("pp2", "dp4 zero3", "dp2 zero2"), marks=pytest.mark.slow),
    ],
)
def test_killed_and_moved_twice_it_equals_one_rank(
    train: Train, tmp_path: Path, model: str, names: Sequence[str]
) -> None:
    keys = overrides_of(model, "float32", iterations=6)
    topologies = [case_of(name) for name in names]
    assert killed_and_moved(tmp_path / "run", [*BASE, *keys], topologies) == train(ALONE, *keys)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dp2 zero3", "pp2"])
def test_compiled_models_have_the_bits_of_one_rank(train: Train, name: str) -> None:
    overrides = (*overrides_of("llama3", "bfloat16", iterations=4), "train.compile=true", "model.n_layer=2")
    assert train(case_of(name), *overrides) == train(ALONE, *overrides)


EIGHT = [Case(f"dp8 zero{stage}", 8, (zero(stage),)) for stage in range(4)]


@pytest.mark.nightly
@pytest.mark.parametrize("case", named([*EVERY, *EIGHT, *EVERY_CUT, *EVERY_CUT_SEQUENCE]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["gpt2", "llama3"])
def test_every_topology_has_the_bits_of_one_rank(train: Train, model: str, dtype: str, case: Case) -> None:
    if case in EIGHT and model == "gpt2":
        pytest.skip("it has lanes for four ranks")
    overrides = overrides_of(model, dtype, iterations=30)
    one = CUT_SEQUENCE if SP in case.overrides else CUT if TP in case.overrides else ALONE
    assert train(case, *overrides) == train(one, *overrides)
