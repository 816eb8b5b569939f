"""States of random numbers, and the files in which other programs would have saved them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from models.config import Family, ModelConfig
from models.families import aliases, hf_config, stored_tensors
from reprise.ranks import single_rank_channel
from tests.harness import TINY, built, compose, filled
from trainer.interop.formats import ImportOptions
from trainer.interop.source import StateSource
from trainer.interop.table import FORMATS
from trainer.launch.process_group import Cluster
from trainer.run.build import Run

SAVED = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("", "exp_avg.", "exp_avg_sq.")
# What no file has: the sizes of the training, and the tokens that begin and end a document.
ALONE = [override for override in TINY if not override.startswith("model.")]
ENDS = ["model.bos_token_id=256", "model.eos_token_id=256"]
SIZES = ["model.n_layer=4", "model.n_head=4", "model.n_embd=24", "model.intermediate_size=96"]
LLAMA = ["model=llama3_tiny", "model.n_kv_head=2"]
MODELS = {
    "gpt2": ["model=gpt2_tiny"],
    "gpt2 exact": ["model=gpt2_tiny", "model.activation=gelu"],
    "llama": [*LLAMA, "model.tie_word_embeddings=false"],
    "llama tied": [*LLAMA, "model.tie_word_embeddings=true"],
    "qwen3": ["model=qwen3_tiny", "model.n_kv_head=2", "model.head_dim=6"],
}
Values = Mapping[str, Tensor]


def cases(gate: str, slow: str) -> list[Any]:
    """Return names that are divided by commas as parameters of a test, of which the gate runs those that come first."""
    return [*gate.split(", "), *(pytest.param(name, marks=pytest.mark.slow) for name in slow.split(", "))]


def overrides_of(family: str) -> list[str]:
    return [*MODELS[family], *ALONE, *SIZES, *ENDS]


def state_of(family: str, seed: int = 1, *overrides: str) -> StateSource:
    """Return a state of random numbers after three iterations."""
    return random_state(compose([*overrides_of(family), *overrides]).model, seed)


def random_state(model: ModelConfig, seed: int = 1) -> StateSource:
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, stored in stored_tensors(model).items():
        for prefix in KINDS:  # positive for the sake of second moments
            tensors[prefix + name] = torch.rand(stored.shape, generator=generator)
        tensors[f"step.{name}"] = torch.tensor(float(SAVED))
    return StateSource(model, SAVED, has_optimizer=True, read=tensors.__getitem__)


def weights_of(state: StateSource, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of one kind by the names of their parameters."""
    return {name: state.read(prefix + name) for name in stored_tensors(state.model)}


def changed(state: StateSource, **tensors: Tensor) -> StateSource:
    """Return a state with other tensors; in a keyword, `__` stands for a dot."""
    others = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return replace(state, read=lambda name: others[name] if name in others else state.read(name))


def opened(kind: str, path: Path, overrides: list[str], **options: Any) -> StateSource:
    """Open a checkpoint whose pickles are trusted."""
    asked = {"trusts_pickle": True, "overrides": overrides, **options}
    return FORMATS[kind].read(path, ImportOptions(compose(overrides), **asked))


def assert_carried(found: StateSource, state: StateSource) -> None:
    """Compare every weight, moment and step bit for bit."""
    for name in names_in(replace(state, has_optimizer=found.has_optimizer)):
        assert torch.equal(found.read(name), state.read(name)), name
    assert found.iteration == (SAVED if found.has_optimizer else 0)


def names_in(source: StateSource) -> list[str]:
    kinds = (*KINDS, "step.") if source.has_optimizer else ("",)
    return [kind + name for name in stored_tensors(source.model) for kind in kinds]


def read_all(source: StateSource) -> None:
    for name in names_in(source):
        source.read(name)


def begun(*overrides: str) -> Run:
    """Return a run of one process after its start, with its saves ended."""
    run = built(compose([*overrides]), Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test"))
    with run.saves:
        return filled(run)


def replace_file(path: Path, change: Callable[[Any], object]) -> None:
    """Save the changed content of a file of torch in its place; it may be mapped."""
    table = torch.load(path, weights_only=False)
    change(table)
    torch.save(table, path.with_name("new"))
    path.with_name("new").replace(path)


# ---- transformers, nanoGPT


def write_hf(folder: Path, state: StateSource, *, files: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(state.model)))
    weights = {name: tensor.to(dtype) for name, tensor in weights_of(state).items()}
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = {name: f"model-{n % files + 1:05d}-of-{files:05d}.safetensors" for n, name in enumerate(weights)}
    for file in sorted(set(names.values())):
        save_file({n: w for n, w in weights.items() if names[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


LINEAR = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def write_nanogpt(folder: Path, state: StateSource, *, is_old: bool = False, prefix: str = "", **others: Any) -> Path:
    """Write `ckpt.pt` as nanoGPT's `train.py` does: moments by number, matrices first; no biases where they are zero.

    Args:
        is_old: as before May 2023, with names in order and masks.
        prefix: of the names of a compiled model.
    """
    model = state.model
    kept = [name for name, value in weights_of(state).items() if not name.endswith(".bias") or value.any()]
    weights, *moments = (
        {name: value.T.contiguous() if name.endswith(LINEAR) else value for name, value in weights_of(state, k).items()}
        for k in KINDS
    )
    decays = [name for name in kept if (name.endswith(LINEAR) if is_old else weights[name].dim() > 1)]
    groups = [decays, [name for name in kept if name not in decays]]
    order = [name for group in groups for name in (sorted(group) if is_old else group)]
    entries = {
        number: {"step": state.read(f"step.{name}"), **{k: m[name] for k, m in zip(MOMENTS, moments, strict=True)}}
        for number, name in enumerate(order)
    }
    numbers = [list(range(len(decays))), list(range(len(decays), len(order)))]
    sizes = {"n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd, "vocab_size": model.vocab_size}
    module = {prefix + name: weights[name] for name in kept}
    module[f"{prefix}lm_head.weight"] = weights["transformer.wte.weight"]
    if is_old:
        module |= {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 32, 32).tril() for n in range(model.n_layer)}
    has_bias = any(name.endswith(".bias") for name in kept)
    table = {
        "model": module,
        "optimizer": {"state": entries, "param_groups": [{"lr": 1e-3, "params": group} for group in numbers]},
        "model_args": {**sizes, "block_size": model.max_position_embeddings, "bias": has_bias, "dropout": 0.0},
        "iter_num": state.iteration,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": "shakespeare_char"},
    }
    folder.mkdir(parents=True)
    torch.save(table | others, folder / "ckpt.pt")
    return folder


# ---- llm.c: https://github.com/karpathy/llm.c, `write_model` of `train_gpt2.py` and `train_llama3.py`


def pairs_from_halves(tensor: Tensor, heads: int) -> Tensor:
    """Undo what transformers' conversion script does to LLaMA's own weights, row by row."""
    half = tensor.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return tensor[rows]


def llmc_gpt2(weights: Values, model: ModelConfig) -> Iterator[Tensor]:
    """Yield what the description lists for GPT-2, in that order."""
    yield pad(weights["transformer.wte.weight"], (0, 0, 0, -model.vocab_size % 128))
    yield weights["transformer.wpe.weight"]
    kinds = "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias "
    kinds += "ln_2.weight ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias"
    for kind in kinds.split():
        for layer in range(model.n_layer):
            yield weights[f"transformer.h.{layer}.{kind}"].t()
    yield weights["transformer.ln_f.weight"]
    yield weights["transformer.ln_f.bias"]


def llmc_llama(weights: Values, model: ModelConfig) -> Iterator[Tensor]:
    """Yield what the description lists for LLaMA-3, in that order."""
    yield weights["model.embed_tokens.weight"]
    norms, attention = ("input_layernorm", "post_attention_layernorm"), "self_attn."
    for name in (norms[0], "qkv", f"{attention}o_proj", norms[1], "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"):
        for at in (f"model.layers.{layer}." for layer in range(model.n_layer)):
            if name != "qkv":
                yield weights[f"{at}{name}.weight"]
                continue
            yield pairs_from_halves(weights[f"{at}{attention}q_proj.weight"], model.n_head)
            yield pairs_from_halves(weights[f"{at}{attention}k_proj.weight"], model.n_kv_head)
            yield weights[f"{at}{attention}v_proj.weight"]
    yield weights["model.norm.weight"]
    yield weights["lm_head.weight"]


def llmc_header(model: ModelConfig) -> list[int]:
    """Return a header as llm.c writes it: what is no integer is truncated to one."""
    sizes = [model.max_position_embeddings, model.vocab_size, model.n_layer, model.n_head]
    if model.family is Family.gpt2:
        return [20240326, 3, *sizes, model.n_embd, model.vocab_size + -model.vocab_size % 128]
    scaled = int(model.rope_scaling is not None)
    return [20240803, 3, *sizes, model.n_kv_head, model.n_embd, 1, 8, 0, int(model.rope_theta), scaled, 4, 3, scaled]


def write_llmc(
    path: Path, state: StateSource, *, dtype: torch.dtype = torch.float32, header: list[int] | None = None
) -> Path:
    tensors = (llmc_gpt2 if state.model.family is Family.gpt2 else llmc_llama)(weights_of(state), state.model)
    first, _, *rest = header or llmc_header(state.model)
    content = struct.pack("<256i", first, 3 if dtype is torch.float32 else 5, *rest, *[0] * (254 - len(rest)))
    content += b"".join(bytes(t.to(dtype).contiguous().view(torch.uint8).numpy().data) for t in tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ---- DeepSpeed's universal checkpoints: `merge_tp_slices` and `merge_zero3_slices` of `checkpoint/ds_to_universal.py`


class LossScaler:
    """Stands for the classes of DeepSpeed whose objects lie in its files."""

    def __init__(self) -> None:
        self.scale = 1.0


def write_universal(
    folder: Path, state: StateSource, *, stage: int = 2, prefix: str = "", frozen: Container[str] = ()
) -> Path:
    """Write a folder as DeepSpeed's program makes it of one at a stage; at 3, tensors are flat and steps elsewhere."""
    tag = folder / f"global_step{SAVED}_universal"
    zero = tag / "zero"
    names = list(stored_tensors(state.model))
    for name in names:
        (zero / f"{prefix}{name}").mkdir(parents=True)
        for kind, key in zip(("fp32", *MOMENTS), KINDS, strict=True):
            tensor = state.read(key + name).clone()
            if kind == "fp32" or name not in frozen:
                content = tensor.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": tensor}
                torch.save(content, zero / f"{prefix}{name}" / f"{kind}.pt")
        if stage < 3 and name not in frozen:
            torch.save(state.read(f"step.{name}"), zero / f"{prefix}{name}/step.pt")
    if stage < 3:  # every tensor of the module without moments
        for second, name in aliases(state.model).items():
            (zero / f"{prefix}{second}").mkdir()
            torch.save({"param": state.read(name)}, zero / f"{prefix}{second}/fp32.pt")
    groups = [{"lr": 1e-3, "params": [0]}]
    flat = {"step": torch.tensor(float(SAVED)), "exp_avg": torch.zeros(7)}
    whole = {"optimizer_state_dict": {"state": {0: flat}}} if stage == 3 else {}
    torch.save({"loss_scaler": LossScaler(), "param_groups": groups, **whole}, zero / "optimizer_state.pt")
    module = {f"{prefix}{name}": torch.empty(0) if stage == 3 else state.read(name) for name in names}
    saved = {"module": module, "global_steps": SAVED, "global_samples": 12 * SAVED, "ds_version": "0.19.8"}
    torch.save(saved, tag / f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(tag.name)
    return folder


# ---- torch's DCP


def save_dcp(folder: Path, state: Mapping[str, Any]) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def flat_moments(state: StateSource) -> dict[str, Any]:
    """Return AdamW's state as torch flattens it."""
    return {
        f"state.{name}.{key}": state.read(f"{key}.{name}")
        for name in stored_tensors(state.model)
        for key in (*MOMENTS, "step")
    }


def write_dcp(folder: Path, state: StateSource) -> Path:
    """Write model and optimizer as torch's documentation has them saved."""
    kinds = (*MOMENTS, "step")
    entries = {name: {key: state.read(f"{key}.{name}") for key in kinds} for name in stored_tensors(state.model)}
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": list(entries)}]}
    return save_dcp(folder, {"model": weights_of(state), "optim": optimizer, "epoch": 1})


def write_flat_dcp(folder: Path, state: StateSource) -> Path:
    return save_dcp(folder, {"model": weights_of(state), "optimizer": flat_moments(state), "step": torch.tensor(3)})


TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_torchtitan(state: StateSource) -> dict[str, Any]:
    """Return a state as torchtitan's checkpoints have it: the model on top, AdamW flattened, and what it adds."""

    def renamed(key: str, value: Tensor) -> tuple[str, Tensor]:
        if value.ndim == 2 and ("q_proj" in key or "k_proj" in key):
            value = pairs_from_halves(value, state.model.n_head if "q_proj" in key else state.model.n_kv_head)
        for ours, theirs in TITAN.items():
            key = key.replace(ours, theirs)
        return key, value

    return {
        **dict(renamed(key, value) for key, value in weights_of(state).items()),
        "optimizer": dict(renamed(key, value) for key, value in flat_moments(state).items()),
        "lr_scheduler": {"last_epoch": SAVED},
        "dataloader": {"dp_rank_0": b"position", "world_size": 1},
        "train_state": {"step": torch.tensor(SAVED, dtype=torch.int32), "ntokens_seen": torch.tensor(576)},
    }


def with_fused_moments(titan: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return a state of torchtitan since release 0.3, whose fused projection is split in the model alone."""

    def newer(key: str) -> str:
        return key.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")

    optimizer = {newer(key): value for key, value in titan["optimizer"].items()}
    for query in [key for key in optimizer if ".qkv_linear.wq." in key]:
        parts = [optimizer.pop(query.replace(".wq.", f".{name}.")) for name in ("wq", "wk", "wv")]
        if parts[0].ndim:
            q, k, v = (part.split(model.head_width) for part in parts)
            shared = model.n_head // model.n_kv_head
            groups = [[*q[n * shared : (n + 1) * shared], k[n], v[n]] for n in range(model.n_kv_head)]
            parts[0] = torch.cat([head for group in groups for head in group])
        optimizer[query.replace(".wq.", ".wqkv.")] = parts[0]
    return {newer(key).replace("output.", "lm_head."): value for key, value in titan.items()} | {"optimizer": optimizer}
