"""A model's low-rank adapters as data: adapted projections, tensors and names. Does not import torch.

On disk an adapter has PEFT's names and shapes, `base_model.model.<module>.lora_A.weight` and `.lora_B.weight`.
Source: `peft.tuners.lora` and `peft.utils.save_and_load`, PEFT 0.21.
"""

from dataclasses import replace
from math import sqrt

from models.config import Initial, InitialKind, LoraConfig, ModelConfig, StoredTensor
from models.families import hf_config, spec_of, stored_tensors
from models.hf_config import generation_members

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
_MOST_ALPHA = 1e9


def base_of(config: ModelConfig) -> ModelConfig:
    """Return the model without adapters."""
    return replace(config, lora=LoraConfig())


def adapted_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the adapted modules' names in model order; none without `model.lora.rank`."""
    return tuple(name for name in _projections(config) if config.is_adapted and _fits(name, _targets(config)))


def adapter_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return all adapters' stored tensors in model order.

    A is [rank, in] and B [out, rank]. In memory a fused projection's B is [parts, out, rank], like its weight.
    """
    tensors = {}
    projections, rank = _projections(config), config.lora.rank
    for module in adapted_modules(config):
        weight = projections[module]
        transposed = spec_of(config).fan_in_fan_out
        fan_in, fan_out = weight.shape if transposed else reversed(weight.shape)
        tensors[PREFIX + module + A] = StoredTensor.plain(rank, fan_in)
        view = (*weight.view[1:], rank) if transposed else (fan_out, rank)
        tensors[PREFIX + module + B] = StoredTensor((fan_out, rank), view)
    return tensors


def adapter_initial_values(config: ModelConfig) -> dict[str, Initial]:
    """Return initial values for every adapter tensor: PEFT's, with which the model starts out equal to its base.

    A is `kaiming_uniform_` with a = sqrt(5), whose bound is 1 / sqrt(in); B is zero.
    """
    values = {}
    for name, tensor in adapter_tensors(config).items():
        is_first = name.endswith(A)
        bound = 1 / sqrt(tensor.shape[1])
        values[name] = Initial(InitialKind.uniform, bound) if is_first else Initial(InitialKind.zeros)
    return values


def saved_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors in the model's checkpoint: its adapters if it has any, else the complete model."""
    return adapter_tensors(config) if config.is_adapted else stored_tensors(config)


def stored_name(parameter: str) -> str:
    """Return a parameter's name on disk, given its name in the network; a tied parameter keeps its second name."""
    return PREFIX + parameter if parameter.endswith((A, B)) else parameter


def adapter_problems(config: ModelConfig) -> list[str]:
    """Return every reason why the model cannot have the configured adapters; each names its key and value."""
    lora = config.lora
    if lora.rank == 0:
        return []
    messages = [] if lora.rank > 0 else [f"model.lora.rank={lora.rank}: must be 0 (no adapters) or more"]
    if not 0 <= lora.dropout < 1:
        messages.append(f"model.lora.dropout={lora.dropout}: must be at least 0 and below 1")
    if not 0 < lora.alpha <= _MOST_ALPHA:
        messages.append(f"model.lora.alpha={lora.alpha}: must be above 0 and at most {_MOST_ALPHA:g}")
    if lora.target_modules == []:
        messages.append("model.lora.target_modules=[]: is empty; use null for the family's default")
    projections = _projections(config)
    widest = max(size for name in adapted_modules(config) or projections for size in projections[name].shape)
    if lora.rank > widest:
        messages.append(
            f"model.lora.rank={lora.rank}: must be at most {widest}, the largest width of an adapted matrix"
        )
    for target in lora.target_modules or ():
        if not any(_fits(name, (target,)) for name in projections):
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in projections))
            messages.append(f"model.lora.target_modules: {target!r} matches no projection; choose from {ends}")
    return messages


def peft_config(config: ModelConfig) -> dict[str, object]:
    """Return the `adapter_config.json` with which PEFT opens the adapters. It names no base, which is loaded first."""
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(_targets(config)),
        "fan_in_fan_out": spec_of(config).fan_in_fan_out,
        "bias": "none",
        "inference_mode": True,
    }


def model_documents(config: ModelConfig) -> dict[str, dict[str, object]]:
    """Return the JSON files by which transformers or PEFT opens a checkpoint, by file name."""
    if config.is_adapted:
        return {"adapter_config.json": peft_config(config)}
    return {"config.json": hf_config(config), "generation_config.json": generation_members(config)}


def scale_of(config: ModelConfig) -> float:
    """Return the scale applied to B A."""
    return config.lora.alpha / config.lora.rank


def _targets(config: ModelConfig) -> tuple[str, ...]:
    chosen = config.lora.target_modules
    return spec_of(config).lora_targets if chosen is None else tuple(chosen)


def _fits(module: str, targets: tuple[str, ...]) -> bool:
    """Return whether a module is a target. Source: PEFT's `check_target_module_exists`, for lists."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _projections(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the projection weights in all blocks, by module name in model order."""
    spec = spec_of(config)
    block = {name.removesuffix(".weight"): t for name, t in spec.block(config).items() if len(t.shape) == 2}
    return {f"{spec.blocks}.{layer}.{name}": t for layer in range(config.n_layer) for name, t in block.items()}
