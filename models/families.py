"""The model family table, and what is known about a model before it is built. Does not import torch."""

from dataclasses import fields
from enum import Enum
from math import prod

from models import gpt2_spec, llama3_spec, qwen3_spec
from models.config import Family, Initial, ModelConfig, StoredTensor, common_problems, rotary_problems
from models.spec import OUTPUT, FamilySpec

FAMILIES: dict[Family, FamilySpec] = {
    Family.gpt2: gpt2_spec.SPEC,
    Family.llama3: llama3_spec.SPEC,
    Family.qwen3: qwen3_spec.SPEC,
}
_MOST_PARAMETERS = 10**16  # more overflow sizes in torch
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


def spec_of(config: ModelConfig) -> FamilySpec:
    """Return the family spec for a model."""
    return FAMILIES[config.family]


def family_of_type(model_type: object) -> Family | None:
    """Return the family with this `model_type` in transformers, or None."""
    return next((family for family, spec in FAMILIES.items() if spec.hf.model_type == model_type), None)


def problems(config: ModelConfig) -> list[str]:
    """Return every reason why a model cannot have these sizes; each names its key and value."""
    spec, family = spec_of(config), config.family.value
    messages = common_problems(config)
    for name, origin in spec.follows.items():
        value, expected = getattr(config, name), getattr(config, origin)
        if value != expected:
            messages.append(f"model.{name}={value}: {family} needs it equal to model.{origin}={expected}")
    messages += [f"model.{name}=null: {family} needs it" for name in spec.needs if getattr(config, name) is None]
    for name, reason in spec.unused.items():
        value = getattr(config, name)
        if value != _DEFAULTS[name]:
            messages.append(f"model.{name}={value.value if isinstance(value, Enum) else value}: {reason}")
    messages += rotary_problems(config) if spec.is_rotary else []
    if not messages and (count := parameter_count(config)) > _MOST_PARAMETERS:
        messages.append(f"model: {count:,} parameters, must be at most {_MOST_PARAMETERS:,}")
    return messages


def has_field(family: Family, name: str) -> bool:
    """Return whether a `ModelConfig` field applies to a family."""
    return name not in FAMILIES[family].unused


def stored_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the whole model's stored tensors in model order, without a tied output weight."""
    spec = spec_of(config)
    stored, block = spec.first(config), spec.block(config)
    for layer in range(config.n_layer):
        stored |= {f"{spec.blocks}.{layer}.{name}": tensor for name, tensor in block.items()}
    stored |= spec.last(config)
    return stored if config.tie_word_embeddings else stored | {OUTPUT: stored[spec.embedding]}


def aliases(config: ModelConfig) -> dict[str, str]:
    """Map each tied tensor's second name to its stored name."""
    return {OUTPUT: spec_of(config).embedding} if config.tie_word_embeddings else {}


def block_matrices(config: ModelConfig) -> frozenset[str]:
    """Return the names of the blocks' matrices: no embedding tables, no output layer."""
    block = [name for name, tensor in spec_of(config).block(config).items() if len(tensor.shape) == 2]
    blocks = spec_of(config).blocks
    return frozenset(f"{blocks}.{layer}.{name}" for layer in range(config.n_layer) for name in block)


def initial_values(config: ModelConfig) -> dict[str, Initial]:
    """Return every stored tensor's initial values, in model order."""
    initial = spec_of(config).initial
    return {name: initial(name, config) for name in stored_tensors(config)}


def parameter_count(config: ModelConfig) -> int:
    """Count the stored parameters: a tied table once, padding rows not at all."""
    spec = spec_of(config)
    output = 0 if config.tie_word_embeddings else config.vocab_size * config.n_embd
    return _count(spec.first(config)) + config.n_layer * _count(spec.block(config)) + _count(spec.last(config)) + output


def _count(tensors: dict[str, StoredTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors.values())


def flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Return the floating-point operations of one token's forward and backward pass, recomputation not counted.

    6 N + 12 n_layer n_head head_width seq_length, where N leaves out the lookup tables and the causal half of attention
    is not discounted. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    spec = spec_of(config)
    # Among the tensors before the blocks, only a table shared with the output layer takes part in a product.
    looked_up = _count({n: t for n, t in spec.first(config).items() if n not in aliases(config).values()})
    attention = 12 * config.n_layer * config.n_head * config.head_width * seq_length
    return 6 * (parameter_count(config) - looked_up) + attention


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Return the `config.json` with which transformers opens the stored tensors."""
    return spec_of(config).hf.write(config)
