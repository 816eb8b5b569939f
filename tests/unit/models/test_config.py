"""Shipped configurations, published sizes, and what is refused."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from models import families
from models.build import build_model
from models.config import Activation, ModelConfig, RopeScaling
from models.families import flops_per_token, parameter_count, problems, stored_tensors
from tests import ROOT
from tests.unit.model_samples import FAMILIES, GPT2, LLAMA3, QWEN3

CONFIGS = ROOT / "configs" / "model"


def read_config(name: str) -> ModelConfig:
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(CONFIGS / f"{name}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_count_in_closed_form_is_that_of_the_stored_tensors(path: Path) -> None:
    shipped = read_config(path.stem)
    for config in (shipped, replace(shipped, tie_word_embeddings=not shipped.tie_word_embeddings)):
        assert parameter_count(config) == sum(prod(tensor.shape) for tensor in stored_tensors(config).values())


def test_flops_per_token_count_what_is_multiplied() -> None:
    config = read_config("gpt2_124m")
    attention = 12 * 12 * 768 * 1024
    assert flops_per_token(config, 1024) == 6 * (124439808 - 1024 * 768) + attention
    untied = replace(config, tie_word_embeddings=False)
    assert flops_per_token(untied, 1024) == flops_per_token(config, 1024)


def test_problems_lists_every_fault_at_once() -> None:
    broken = replace(
        GPT2, n_layer=0, n_head=4, n_kv_head=3, dropout=1.0, norm_eps=float("nan"), bos_token_id=-1, eos_token_id=257
    )
    found = problems(replace(broken, pad_vocab_multiple=0, rope_scaling=RopeScaling()))
    for fault in (
        "model.n_layer=0",
        "model.n_head=4",
        "model.n_kv_head=3: must divide",
        "model.n_kv_head=3: gpt2 needs",
        "model.dropout=1.0",
        "model.norm_eps=nan",
        "model.bos_token_id=-1",
        "model.eos_token_id=257",
        "model.pad_vocab_multiple=0",
        "model.rope_scaling=",
    ):
        assert sum(problem.startswith(fault) for problem in found) == 1, (fault, found)
    assert len(found) == 10


def test_llama3_refuses_another_activation_by_name() -> None:
    (found,) = problems(replace(LLAMA3, activation=Activation.gelu))
    assert found.startswith("model.activation=gelu: llama3")
    assert problems(replace(GPT2, activation=Activation.gelu)) == []


@pytest.mark.parametrize("number", [1e300, float("inf"), float("nan"), -1e-5, 0.0, 1e-300])
@pytest.mark.parametrize("name", ["norm_eps", "initializer_range", "rope_theta"])
def test_a_number_that_no_float32_model_has_is_a_problem(name: str, number: float) -> None:
    (problem,) = problems(replace(GPT2, **{name: number}))
    assert problem.startswith(f"model.{name}={number}: must be a number from ")


def test_problems_lists_every_fault_of_rotary_positions() -> None:
    scaling = RopeScaling(factor=0.5, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position_embeddings=0)
    found = problems(replace(LLAMA3, n_embd=66, n_head=6, dropout=0.1, rope_theta=0.0, rope_scaling=scaling))
    assert [problem.split("=")[0] for problem in found] == [
        "model.rope_theta",
        "model.dropout",
        "model.n_embd",
        "model.rope_scaling.factor",
        "model.rope_scaling.high_freq_factor",
        "model.rope_scaling.original_max_position_embeddings",
    ]


def test_each_family_has_a_model_type_of_its_own() -> None:
    types = [spec.hf.model_type for spec in families.FAMILIES.values()]
    assert [families.family_of_type(name) for name in types] == [*families.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("size", ["n_head", "n_kv_head", "n_embd"])
def test_problems_survive_sizes_of_zero(family: ModelConfig, size: str) -> None:
    assert any(problem.startswith(f"model.{size}=0") for problem in problems(replace(family, **{size: 0})))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_build_model_refuses_with_every_reason(family: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"(?s)model\.n_layer=0.*model\.dropout=2"):
        build_model(replace(family, n_layer=0, dropout=2.0))


def test_a_width_of_heads_belongs_to_qwen3_which_needs_it() -> None:
    assert problems(replace(GPT2, head_dim=10)) == ["model.head_dim=10: gpt2 does not have it; omit the key"]
    assert problems(replace(LLAMA3, head_dim=10)) == ["model.head_dim=10: llama3 does not have it; omit the key"]
    assert "model.head_dim=null: qwen3 needs it" in problems(replace(QWEN3, head_dim=None))
    assert problems(replace(QWEN3, head_dim=0))[0] == "model.head_dim=0: must be at least 1"
    assert problems(replace(QWEN3, head_dim=7)) == ["model.head_dim=7: rotary positions need an even width per head"]
