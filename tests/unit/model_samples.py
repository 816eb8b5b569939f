"""Small models of all families with random values, and the ways to run them that the tests of models share."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.adapters import model_documents
from models.config import Activation, Family, InitialKind, ModelConfig, RopeScaling
from models.families import aliases, initial_values, stored_tensors
from models.layers import token_loss
from models.network import Model

GPT2 = ModelConfig(
    family=Family.gpt2,
    n_layer=3,
    n_head=3,
    n_kv_head=3,
    n_embd=30,
    intermediate_size=52,
    vocab_size=257,
    max_position_embeddings=48,
    bos_token_id=256,
    eos_token_id=256,
)
LLAMA3 = replace(
    GPT2,
    family=Family.llama3,
    n_head=6,
    n_kv_head=2,
    n_embd=60,
    tie_word_embeddings=False,
    # Small enough for the heads to have frequencies that are kept, blended and divided.
    rope_theta=100.0,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
)
# Heads wider than n_embd / n_head, which 5 does not divide.
QWEN3 = replace(
    LLAMA3, family=Family.qwen3, n_embd=62, n_head=5, n_kv_head=1, head_dim=14, rope_scaling=None, norm_eps=1e-6
)
VARIANTS = {
    "gpt2-tied": GPT2,
    "gpt2-exact-gelu": replace(GPT2, activation=Activation.gelu),
    "gpt2-untied": replace(GPT2, tie_word_embeddings=False),
    "llama3-untied-grouped-scaled": LLAMA3,
    "llama3-tied": replace(LLAMA3, tie_word_embeddings=True),
    "llama3-all-heads": replace(LLAMA3, n_kv_head=6),
    "llama3-unscaled": replace(LLAMA3, rope_scaling=None),
    "qwen3-untied-grouped": QWEN3,
    "qwen3-tied": replace(QWEN3, tie_word_embeddings=True),
    "qwen3-all-heads": replace(QWEN3, n_head=4, n_kv_head=4),
}
FAMILIES = {"gpt2": GPT2, "llama3": LLAMA3, "qwen3": QWEN3}


def random_values(config: ModelConfig) -> dict[str, Tensor]:
    """Return values in stored form, large enough in every tensor for a swapped or skipped one to show."""
    return {
        name: torch.randn(tensor.shape) * 0.1 + (1.0 if initial_values(config)[name].kind is InitialKind.ones else 0.0)
        for name, tensor in stored_tensors(config).items()
    }


def fill(model: Model, values: dict[str, Tensor]) -> Model:
    """Copy values in stored form into the leading boxes of the live parameters; what is left is zero."""
    stored, names = stored_tensors(model.config), aliases(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            view = stored[names.get(name, name)].view
            parameter.zero_()
            parameter[tuple(slice(n) for n in view)] = values[names.get(name, name)].view(view)
    return model


def stored_gradients(model: Model) -> dict[str, Tensor]:
    """Return the gradients in stored form."""
    stored = stored_tensors(model.config)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        box = parameter.grad[tuple(slice(n) for n in stored[name].view)]
        gradients[name] = box.reshape(stored[name].shape)
    return gradients


def samples(config: ModelConfig, batch: int = 3, length: int = 40) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, two of them left out."""
    tokens = torch.randint(config.vocab_size, (batch, length + 1))
    targets = tokens[:, 1:].clone()
    targets[0, :2] = -100
    return tokens[:, :-1], targets


def backward(model: Model, batch: tuple[Tensor, Tensor], dropout_key: int | None = None) -> Tensor:
    """Run forward and backward, return the loss; gradients are in `model`."""
    model.zero_grad(set_to_none=True)
    loss = token_loss(model(batch[0], dropout_key=dropout_key), batch[1])
    loss.backward()
    return loss.detach()


def save_as_transformers(folder: Path, config: ModelConfig, values: dict[str, Tensor]) -> None:
    """Write a model folder from our own declarations alone."""
    for name, document in model_documents(config).items():
        (folder / name).write_text(json.dumps(document))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def open_with_transformers(folder: Path) -> torch.nn.Module:
    """Return transformers' model of a folder, with its plainest attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
