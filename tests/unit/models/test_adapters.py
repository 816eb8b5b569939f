"""The adapters of a model: which projections have one, their names, shapes and initial values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.adapters import (
    adapted_modules,
    adapter_initial_values,
    adapter_problems,
    peft_config,
    scale_of,
)
from models.config import Family, InitialKind, LoraConfig, ModelConfig

GPT2 = ModelConfig(
    family=Family.gpt2, n_layer=2, n_head=2, n_kv_head=2, n_embd=20, intermediate_size=44, vocab_size=257,
    max_position_embeddings=32, bos_token_id=256, eos_token_id=256, lora=LoraConfig(rank=4),
)  # fmt: skip
LLAMA = replace(GPT2, family=Family.llama3, n_kv_head=1)
ATTN = "transformer.h.1.attn.c_attn"


def with_lora(model: ModelConfig, **values: object) -> ModelConfig:
    return replace(model, lora=replace(model.lora, **values))


def test_defaults_are_those_of_peft() -> None:
    assert adapted_modules(GPT2) == ("transformer.h.0.attn.c_attn", ATTN)
    assert [name.rpartition(".")[2] for name in adapted_modules(LLAMA)] == ["q_proj", "v_proj"] * 2


def test_targets_are_ends_of_module_names() -> None:
    both = adapted_modules(with_lora(GPT2, target_modules=["c_proj"]))
    assert [name.removeprefix("transformer.h.0.") for name in both[:2]] == ["attn.c_proj", "mlp.c_proj"]
    assert adapted_modules(with_lora(GPT2, target_modules=[ATTN])) == (ATTN,)
    assert adapted_modules(with_lora(GPT2, target_modules=["1.mlp.c_fc"])) == ("transformer.h.1.mlp.c_fc",)


def test_a_model_begins_as_its_base() -> None:
    first, second = list(adapter_initial_values(GPT2).values())[:2]
    assert (first.kind, first.scale) == (InitialKind.uniform, 20**-0.5)
    assert second.kind is InitialKind.zeros


def test_the_configuration_of_peft_names_no_base() -> None:
    found = peft_config(with_lora(GPT2, alpha=8.0, dropout=0.1))
    assert (found["r"], found["lora_alpha"], found["lora_dropout"]) == (4, 8, 0.1)
    assert found["fan_in_fan_out"] is True
    assert peft_config(LLAMA)["fan_in_fan_out"] is False
    assert found["base_model_name_or_path"] is None
    assert scale_of(with_lora(GPT2, alpha=8.0)) == 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 1_000_000}, "model.lora.rank=1000000: must be at most"),
        ({"rank": -1}, "model.lora.rank=-1"),
        ({"alpha": 0.0}, "model.lora.alpha=0.0"),
        ({"dropout": 1.0}, "model.lora.dropout=1.0"),
        ({"target_modules": []}, "target_modules=[]: is empty"),
        ({"target_modules": ["attn"]}, "'attn' matches no projection; choose from c_attn, c_proj, c_fc"),
        ({"target_modules": ["c_attn", "lm_head"]}, "'lm_head' matches no projection"),
        ({"target_modules": ["ln_1"]}, "'ln_1' matches no projection"),
    ],
)
def test_impossible_adapters_are_named(values: dict[str, object], words: str) -> None:
    (found,) = adapter_problems(with_lora(GPT2, **values))
    assert words in found


def test_without_a_rank_nothing_is_a_problem() -> None:
    assert adapter_problems(with_lora(GPT2, rank=0, target_modules=["none"])) == []
