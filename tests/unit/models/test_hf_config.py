"""Every member of transformers' configuration classes is carried, refused, named, or changes no model.

The tables list the members of the newest release; a member that a class has and its table lacks fails the test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from models.build import build_model
from models.config import ModelConfig
from models.families import hf_config, stored_tensors
from reprise.errors import MismatchError
from tests.unit.model_samples import fill
from trainer.generate.sampling import Sampling, continue_with
from trainer.interop.hf.config import read_folder_model

CARRIED, REFUSED, NAMED, INERT = "carried", "refused", "named", "inert"
APART = "apart"  # for the tensors' dtype and for batches of texts, which are not the model's
PROMPT, LENGTH = [3, 1, 4], 12
# Stands for a list of end tokens of which the last is the third that the model generates.
SECOND_END = object()
_SHARED: dict[str, tuple[str, Any]] = {
    "_name_or_path": (INERT, "somewhere"),
    "architectures": (INERT, ["SomeModel"]),
    "chunk_size_feed_forward": (INERT, 2),
    "dtype": (APART, "bfloat16"),
    "id2label": (INERT, {"0": "a", "1": "b", "2": "c"}),
    "is_encoder_decoder": (REFUSED, True),
    "label2id": (INERT, {"a": 0, "b": 1}),
    "model_type": (REFUSED, "mistral"),
    "output_attentions": (INERT, True),
    "output_hidden_states": (INERT, True),
    "problem_type": (INERT, "regression"),
    "return_dict": (INERT, False),
    "transformers_version": (INERT, "0.0"),
    "use_cache": (INERT, False),
    "bos_token_id": (CARRIED, 7),
    "eos_token_id": (CARRIED, SECOND_END),
    "pad_token_id": (APART, 0),
    "initializer_range": (CARRIED, 0.05),
    "vocab_size": (CARRIED, 61),
}
_GPT2: dict[str, tuple[str, Any]] = _SHARED | {
    "activation_function": (CARRIED, "gelu"),
    "add_cross_attention": (REFUSED, True),
    "attn_pdrop": (NAMED, 0.3),
    "embd_pdrop": (NAMED, 0.3),
    "layer_norm_epsilon": (CARRIED, 0.1),
    "n_embd": (CARRIED, 24),
    "n_head": (CARRIED, 4),
    "n_inner": (CARRIED, 44),
    "n_layer": (CARRIED, 3),
    "n_positions": (CARRIED, 40),
    "reorder_and_upcast_attn": (NAMED, True),
    "resid_pdrop": (CARRIED, 0.3),
    "scale_attn_by_inverse_layer_idx": (REFUSED, True),
    "scale_attn_weights": (REFUSED, False),
    "summary_activation": (INERT, "tanh"),
    "summary_first_dropout": (INERT, 0.3),
    "summary_proj_to_labels": (INERT, False),
    "summary_type": (INERT, "mean"),
    "summary_use_proj": (INERT, False),
    "tie_word_embeddings": (CARRIED, False),
}
_ROTARY: dict[str, tuple[str, Any]] = _SHARED | {
    "attention_bias": (REFUSED, True),
    "attention_dropout": (NAMED, 0.3),
    "hidden_act": (REFUSED, "gelu"),
    "hidden_size": (CARRIED, 32),
    "intermediate_size": (CARRIED, 52),
    "max_position_embeddings": (CARRIED, 40),
    "num_attention_heads": (CARRIED, 4),
    "num_hidden_layers": (CARRIED, 3),
    "num_key_value_heads": (CARRIED, 1),
    "rms_norm_eps": (CARRIED, 0.1),
    "tie_word_embeddings": (CARRIED, True),
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 8,
}
_LLAMA: dict[str, tuple[str, Any]] = _ROTARY | {
    "head_dim": (REFUSED, 14),
    "mlp_bias": (REFUSED, True),
    "pretraining_tp": (INERT, 2),
    "rope_parameters": (CARRIED, _LLAMA3_ROPE),
}
_QWEN3: dict[str, tuple[str, Any]] = _ROTARY | {
    "head_dim": (CARRIED, 14),
    "layer_types": (REFUSED, ["full_attention", "sliding_attention"]),
    "max_window_layers": (INERT, 0),
    "rope_parameters": (CARRIED, {"rope_type": "default", "rope_theta": 300.0}),
    "sliding_window": (INERT, 2),
    "use_sliding_window": (REFUSED, True),
}
_TOKENS = {"vocab_size": 60, "bos_token_id": 59, "eos_token_id": 59}
_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
_CLASSES: dict[type[PreTrainedConfig], tuple[dict[str, Any], dict[str, tuple[str, Any]]]] = {
    GPT2Config: ({"n_embd": 20, "n_layer": 2, "n_head": 2, "n_positions": 48}, _GPT2),
    LlamaConfig: ({**_SIZES, "intermediate_size": 44, "max_position_embeddings": 48}, _LLAMA),
    Qwen3Config: ({**_SIZES, "head_dim": 10, "intermediate_size": 44, "max_position_embeddings": 48}, _QWEN3),
}
CASES = [(kind, name) for kind, (_, decisions) in _CLASSES.items() for name in decisions]


def base(kind: type[PreTrainedConfig], folder: Path) -> dict[str, Any]:
    """Return the `config.json` that transformers writes for a small model."""
    kind(**_CLASSES[kind][0], **_TOKENS).save_pretrained(folder)
    table: dict[str, Any] = json.loads((folder / "config.json").read_text())
    computed = ("layer_types",) if kind is Qwen3Config else ("head_dim",)  # from the members that a test changes
    return {name: value for name, value in table.items() if name not in computed}


def read(folder: Path, table: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """Return the model of a `config.json`, and the log lines on what it does not carry."""
    (folder / "config.json").write_text(json.dumps(table))
    model, lines = read_folder_model(folder)
    return model, "\n".join(lines)


def outputs(folder: Path, model: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return the logits after a prompt, and the generated tokens, of transformers and of our model of a folder."""
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, return_dict=True)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    state = theirs.state_dict()
    ours = fill(build_model(model), {name: state[name] for name in stored_tensors(model)}).eval()
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = theirs(prompt).logits, ours(prompt)
    text = theirs.generate(prompt, max_new_tokens=LENGTH, do_sample=False)
    tokens = (text if isinstance(text, torch.Tensor) else text.sequences)[0, len(PROMPT) :].tolist()
    return *logits, tokens, continue_with(ours, PROMPT, Sampling(), max_new_tokens=LENGTH)


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_the_table_has_every_member_of_the_class(kind: type[PreTrainedConfig]) -> None:
    assert set(kind().to_dict()) == set(_CLASSES[kind][1])


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_every_member_is_decided(kind: type[PreTrainedConfig], name: str, tmp_path: Path) -> None:
    decision, value = _CLASSES[kind][1][name]
    table = base(kind, tmp_path)
    plain, words = read(tmp_path, table)
    assert words == ""
    if value is SECOND_END:
        value = [59, outputs(tmp_path, plain)[2][2]]
    assert table.get(name) != value
    if decision == REFUSED:
        with pytest.raises(MismatchError, match=f"{name}|found 'mistral'"):
            read(tmp_path, {**table, name: value})
        return
    model, words = read(tmp_path, {**table, name: value})
    assert (f"{name}=" in words) == (decision == NAMED)
    if decision == NAMED:
        return
    assert (model == plain) == (decision != CARRIED)
    if decision == APART:
        return
    logits, ours, tokens, our_tokens = outputs(tmp_path, model)
    torch.testing.assert_close(ours, logits, atol=2e-4, rtol=2e-4)
    assert our_tokens == tokens
    assert name != "eos_token_id" or len(tokens) < LENGTH
    if decision == CARRIED:
        theirs = AutoConfig.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(hf_config(model)))
        assert getattr(AutoConfig.from_pretrained(tmp_path), name) == getattr(theirs, name)
        assert read(tmp_path, hf_config(model)) == (model, "")


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (128, [120, 128], (128, 120)),  # LLaMA-3 Instruct of two releases
        ([120, 121, 128], None, (120, 121, 128)),
        (59, [4, 5], (4, 5)),
        (128, {}, (128,)),
        (None, None, (127,)),
        (500, None, (127,)),
        (1, [500, True], (1,)),
    ],
)
def test_end_tokens_are_those_of_transformers(
    tmp_path: Path, config: object, generation: object, ends: tuple[int, ...]
) -> None:
    table = base(LlamaConfig, tmp_path) | {"vocab_size": 129, "bos_token_id": 127, "eos_token_id": config}
    if generation is not None:
        document = {"eos_token_id": generation} if isinstance(generation, list) else generation
        (tmp_path / "generation_config.json").write_text(json.dumps(document))
    model, words = read(tmp_path, table)
    assert (model.end_tokens, words) == (ends, "")
    assert hf_config(model)["eos_token_id"] == (list(ends) if len(ends) > 1 else ends[0])


def test_of_two_rotations_the_one_of_transformers_counts(tmp_path: Path) -> None:
    table = base(LlamaConfig, tmp_path)
    for more in (
        {"rope_scaling": _LLAMA3_ROPE},
        {"rope_scaling": {key: value for key, value in _LLAMA3_ROPE.items() if key != "rope_theta"}},
        {"rope_scaling": None, "rope_theta": 200.0, "rope_parameters": {"rope_type": "default"}},
    ):
        model, _ = read(tmp_path, {**table, **more})
        logits, ours, tokens, our_tokens = outputs(tmp_path, model)
        torch.testing.assert_close(ours, logits, atol=2e-4, rtol=2e-4)
        assert our_tokens == tokens


@pytest.mark.parametrize(
    "more",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {**_LLAMA3_ROPE, "truncate": True}},
        {"per_layer_config": {"0": {"intermediate_size": 40}}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"transformers_weights": "other.safetensors"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_changes_logits_beside_the_class_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=next(iter(more))):
        read(tmp_path, {**base(LlamaConfig, tmp_path), **more})
