"""With `parallel.invariant_tensor_ranks` a run has the same bits at any tensor parallelism, sequence parallel or not.

Every run starts afresh; its losses, norms, rates, evaluations and tensor files are compared with those of one process.
Four virtual shards on one and two ranks: a rank adds shards before ranks do. The nightly run has every topology of 8.

Each of these mutations alone makes some of the fast tests fail: shards added one after the other, masks of heads or of
tokens by rank, a block of tokens for each rank, a product for each rank in place of each shard, the squares of a row as
a whole, and gradients of norms left out of the tree over ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_invariant_ranks import (
    ALONE,
    PP,
    SP,
    TP,
    VPP,
    Case,
    Train,
    killed_and_moved,
    named,
    trainer_of,
    zero,
)
from tests.harness import TINY
from tests.profiles import nightly

TP4 = "parallel.tensor_model_parallel_size=4"
# Four heads of 5 or 6, 257 tokens in 260 rows, lanes of two micro batches, two samples in each: blocks of tokens are
# no contiguous memory.
BASE = (
    *TINY,
    "model.n_head=4",
    "model.pad_vocab_multiple=4",
    "train.global_batch_size=16",
    "train.eval_iters=2",
    "train.threads=1",
    "checkpoint.save_interval=0",
    "parallel.invariant_ranks=4",
    "parallel.invariant_tensor_ranks=4",
)
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model=gpt2_tiny", "model.dropout=0.1"),
    "llama3": ("model=llama3_tiny", "model.n_kv_head=4", "model.n_embd=24"),
    "qwen3": ("model=qwen3_tiny", "model.n_kv_head=4", "model.n_embd=24", "model.head_dim=6"),
}
MUON = "optimizer=muon"
# Parts of weights are large enough for products with their columns in place.
WIDE = (
    "model.n_embd=256",
    "model.intermediate_size=1024",
    "model.max_position_embeddings=64",
    "train.seq_length=64",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return trainer_of(tmp_path_factory, BASE)


def overrides_of(model: str, dtype: str, *, iterations: int) -> tuple[str, ...]:
    lengths = (f"train.train_iters={iterations}", f"train.eval_interval={iterations // 2}")
    return (*MODELS[model], f"train.dtype={dtype}", *lengths)


def every(tp: str, ranks: int) -> list[Case]:
    """Return every topology of up to 8 ranks with so many tensor-parallel ones."""
    cases = []
    for sequence in ((),) if ranks == 1 else ((), (SP,)):
        name = f"tp{ranks}" + ("+sp" if sequence else "")
        for pp in (1, 2):
            pipeline = (PP,) if pp == 2 else ()
            suffix = " pp2" if pp == 2 else ""
            cases.append(Case(name + suffix, ranks * pp, (tp, *sequence, *pipeline)))
            if 2 * ranks * pp <= 8:
                cases += [
                    Case(f"{name}{suffix} dp2 zero{stage}", 2 * ranks * pp, (tp, *sequence, *pipeline, zero(stage)))
                    for stage in (0, 1, 3)
                ]
    return cases


EVERY = [case for tp, ranks in ((TP.replace("=2", "=1"), 1), (TP, 2), (TP4, 4)) for case in every(tp, ranks)][1:]
TP2_SP = Case("tp2+sp", 2, (TP, SP))


def test_two_ranks_have_the_bits_of_one(train: Train) -> None:
    overrides = overrides_of("gpt2", "float32", iterations=4)
    assert train(TP2_SP, *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "case", "extra"),
    [
        ("llama3", "bfloat16", Case("tp4+sp", 4, (TP4, SP)), ()),
        ("gpt2", "bfloat16", Case("tp2 pp2 vpp2", 4, (TP, PP, VPP)), ("model.n_layer=4",)),
        ("qwen3", "float32", Case("tp2 dp2 zero3", 4, (TP, zero(3))), (MUON, "train.activation_checkpointing=true")),
        ("gpt2", "float32", TP2_SP, WIDE),
        nightly("llama3", "float32", Case("tp2", 2, (TP,)), WIDE),
    ],
    ids=["llama3 tp4+sp", "gpt2 tp2 pp2 vpp2", "qwen3 tp2 dp2 zero3 muon", "gpt2 tp2+sp wide", "llama3 tp2 wide"],
)
def test_any_tensor_parallelism_has_the_bits_of_one_rank(
    train: Train, model: str, dtype: str, case: Case, extra: tuple[str, ...]
) -> None:
    overrides = (*overrides_of(model, dtype, iterations=4), *extra)
    assert train(case, *overrides) == train(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), nightly(("optimizer.moments_dtype=bfloat16", "train.ema_decay=0.9"))])
def test_moved_over_tensor_ranks_it_equals_one_rank(train: Train, tmp_path: Path, extra: tuple[str, ...]) -> None:
    keys = (*overrides_of("gpt2", "float32", iterations=6), *extra)
    topologies = [Case("tp4+sp", 4, (TP4, SP)), Case("tp2 pp2", 4, (TP, PP)), Case("dp2 zero3", 2, (zero(3),))]
    assert killed_and_moved(tmp_path / "run", [*BASE, *keys], topologies) == train(ALONE, *keys)


@pytest.mark.nightly
@pytest.mark.parametrize("case", named(EVERY))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["gpt2", "llama3"])
def test_every_topology_has_the_bits_of_one_rank(train: Train, model: str, dtype: str, case: Case) -> None:
    overrides = overrides_of(model, dtype, iterations=30)
    assert train(case, *overrides) == train(ALONE, *overrides)
