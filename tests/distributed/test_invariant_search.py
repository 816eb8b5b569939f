"""With invariant ranks, runs of random small sizes have the bits of one rank on random topologies.

Sizes are odd on purpose: products with a vector and tensors at every offset of a file take kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.distributed.test_invariant_ranks import PP, SP, TP, VPP, outcome, zero
from tests.harness import launch
from tests.profiles import SEED, nightly, slow

SEEDS = 60
# Families with the widths of a head; those of rotary embeddings are even.
FAMILIES = {"gpt2": (3, 5, 6, 7), "llama3": (2, 6, 10), "qwen3": (2, 6, 10)}
BASE = (
    "train.threads=1",
    "checkpoint.save_interval=0",
    "logging.tensorboard=false",
    "schedule.lr_warmup_iters=1",
    "model.bos_token_id=0",
    "model.eos_token_id=0",
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model with its training, the rank of its adapters, and two topologies with their overrides."""

    overrides: tuple[str, ...]
    lora_rank: int
    topologies: tuple[tuple[int, tuple[str, ...]], ...]


def draw(seed: int) -> Drawn:
    """Return one configuration that can run."""
    random = Random(seed)
    family = random.choice(list(FAMILIES))
    is_cut = random.random() < 0.3  # by tensor parallelism, which has to divide the sizes
    heads = random.choice((2, 4)) if is_cut else random.randint(1, 3)
    width, layers = random.choice(FAMILIES[family]), random.randint(1, 4)
    micro, lanes = random.randint(1, 3), random.choice((2, 4))
    count = lanes * random.randint(1, 2)
    lora_rank = 0 if is_cut else random.choice((0, 0, 1, 1, 2, 3))
    overrides = [
        f"model={family}_tiny",
        f"model.n_layer={layers}",
        f"model.n_head={heads}",
        f"model.n_embd={heads * width}",
        f"model.intermediate_size={random.choice((12, 28) if is_cut else (1, 3, 5, 7, 9, 16))}",
        f"model.vocab_size={random.randint(257, 264)}",
        f"model.tie_word_embeddings={random.choice(('true', 'false'))}",
        f"model.pad_vocab_multiple={random.choice((1, 1, 4))}",
        "model.max_position_embeddings=19",
        f"train.seq_length={random.choice((2, 8, 12) if is_cut else (1, 2, 3, 5, 17))}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={micro * count}",
        f"train.dtype={random.choice(('float32', 'float32', 'bfloat16'))}",
        f"train.activation_checkpointing={random.choice(('true', 'false'))}",
        f"train.clip_grad={random.choice((0.0, 0.1, 1.0))}",
        f"parallel.invariant_ranks={lanes}",
        f"checkpoint.file_bytes={random.choice((4096, 1 << 30))}",
    ]
    if family == "gpt2":
        overrides.append(f"model.dropout={random.choice((0.0, 0.2))}")
    else:
        overrides.append(f"model.n_kv_head={heads if is_cut else random.choice((1, heads))}")
    if family == "qwen3":
        overrides.append(f"model.head_dim={width}")
    if not lora_rank:
        overrides.append(f"optimizer={random.choice(('adamw', 'adamw', 'muon'))}")
    topologies = [(ranks, (zero(stage),)) for ranks in (2, 4) if ranks <= lanes for stage in range(4)]
    if layers >= 2:
        topologies.append((2, (PP,)))
    if layers >= 2 and count >= 4:
        topologies.append((4, (PP, zero(random.randint(0, 3)))))
    if layers >= 4:
        topologies.append((2, (PP, VPP)))
    if is_cut:
        overrides += ["parallel.invariant_tensor_ranks=2", "model.pad_vocab_multiple=4"]
        topologies += [(2, (TP,)), (2, (TP, SP)), (4, (TP, zero(random.randint(0, 3))))]
    return Drawn((*BASE, *overrides), lora_rank, tuple(random.sample(topologies, 2)))


@pytest.mark.parametrize("number", [slow(0), *map(nightly, range(1, SEEDS))])
def test_random_sizes_have_the_bits_of_one_rank(tmp_path: Path, number: int) -> None:
    drawn = draw(number if number < 3 else 1000 * SEED + number)
    own = ["train.train_iters=5", "train.eval_interval=2", "train.eval_iters=1"]
    if drawn.lora_rank:
        base = tmp_path / "base"
        assert launch(base, [*drawn.overrides, "train.train_iters=1"]).ok
        own += [f"model.lora.rank={drawn.lora_rank}", f"checkpoint.base={base}"]
    outcomes = []
    for number, (ranks, topology) in enumerate(((1, ()), *drawn.topologies)):
        folder = tmp_path / str(number)
        ended = launch(folder, [*drawn.overrides, *own, *topology], ranks=ranks, timeout_s=240.0)
        assert ended.ok, ended.text
        outcomes.append(outcome(folder))
    for (ranks, topology), found in zip(drawn.topologies, outcomes[1:], strict=True):
        assert found == outcomes[0], (ranks, topology, drawn)
