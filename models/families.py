"""What is done with a model of either family: building it, and what its tensors, files and costs are.

The architectures are in `gpt2` and `llama3`.
"""

from typing import TypeAlias

import torch

from models import gpt2, llama3
from models.config import Family, Initial, ModelConfig, Stage, StoredTensor, parameter_count, problems
from models.gpt2 import GPT2
from models.llama3 import Llama3

Model: TypeAlias = GPT2 | Llama3


def build_model(
    config: ModelConfig, *, stage: Stage | None = None, compute_dtype: torch.dtype = torch.float32
) -> Model:
    """Build a model, or one stage of it, on torch's current default device with float32 parameters.

    The values are whatever the memory held: fill them by `initial_values` or from a checkpoint, padding rows with
    zeros.

    Raises:
        ValueError: no model of these sizes can be built; the message lists every reason.
    """
    if found := problems(config):
        raise ValueError("impossible model:\n" + "\n".join(f"  {problem}" for problem in found))
    stage = stage or Stage.whole(config.n_layer)
    match config.family:
        case Family.gpt2:
            return GPT2(config, stage, compute_dtype)
        case Family.llama3:
            return Llama3(config, stage, compute_dtype)


def stored_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the whole model as they lie on disk, in model order, without a tied output weight."""
    match config.family:
        case Family.gpt2:
            return gpt2.stored_tensors(config)
        case Family.llama3:
            return llama3.stored_tensors(config)


def aliases(config: ModelConfig) -> dict[str, str]:
    """Return the names that mean another stored tensor, and that tensor's name."""
    match config.family:
        case Family.gpt2:
            return gpt2.aliases(config)
        case Family.llama3:
            return llama3.aliases(config)


def initial_values(config: ModelConfig) -> dict[str, Initial]:
    """Return the initial values of every stored tensor, in model order."""
    match config.family:
        case Family.gpt2:
            return gpt2.initial_values(config)
        case Family.llama3:
            return llama3.initial_values(config)


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Return what `config.json` must hold for transformers to open the stored tensors."""
    match config.family:
        case Family.gpt2:
            return gpt2.hf_config(config)
        case Family.llama3:
            return llama3.hf_config(config)


def generation_config(config: ModelConfig) -> dict[str, object]:
    """Return what `generation_config.json` must hold for transformers to stop at the end of a text."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}


def flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Return the floating-point operations of one token's forward and backward pass, recomputation not counted.

    6 N + 12 n_layer n_embd seq_length, where N leaves out the tables that are only looked up and the causal half of
    attention is not discounted. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    match config.family:
        case Family.gpt2:
            looked_up = gpt2.looked_up_parameters(config)
        case Family.llama3:
            looked_up = llama3.looked_up_parameters(config)
    multiplied = parameter_count(config) - looked_up
    return 6 * multiplied + 12 * config.n_layer * config.n_embd * seq_length
