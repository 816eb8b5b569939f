"""Maps the keys of a DCP folder to our tensors, by names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from models.config import Family, ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import MismatchError, count_of
from trainer.interop.formats import few
from trainer.interop.projections import halves_from_pairs, split_groups
from trainer.interop.source import MOMENTS, STEP
from trainer.interop.stored import Shape, Sized, require_fit


@dataclass(frozen=True, slots=True)
class KeyOrigin:
    """Where our tensor comes from: the other program's name, its tensor's shape, and the part to take.

    `take` maps a tensor with `shape` to ours, for weights and moments alike.
    """

    name: str
    shape: Shape
    take: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


@dataclass(frozen=True, slots=True)
class LocatedKeys:
    """A model's tensors in a folder.

    Args:
        scheme: The program whose names the folder uses.
        keys: The folder's key, and the part to take, for each tensor, moment and step.
        tied: The second key, for each tied tensor stored twice.
        has_optimizer: Whether `keys` include moments and steps.
    """

    scheme: str
    keys: Mapping[str, tuple[str, KeyOrigin]]
    tied: Mapping[str, str]
    has_optimizer: bool


def locate(
    tensors: Mapping[str, Sized],
    values: Iterable[str],
    config: ModelConfig,
    *,
    where: object,
    with_optimizer: bool = True,
) -> LocatedKeys:
    """Find a model's tensors, and its optimizer's, among keys with any prefix.

    Args:
        tensors: The folder's tensors, by key.
        values: The keys of its other values, such as steps stored as Python numbers.
        with_optimizer: Whether to look for optimizer state.

    Raises:
        MismatchError: The folder does not fit the model: another family, missing or unexpected tensors, other shapes,
            or optimizer state for only some parameters. The error lists all problems.
    """
    scheme, origins, prefix = _scheme(tensors, config, where=where)
    pairs_by_name = _present(tensors, origins, prefix)
    keys = {name: pairs[0] for name, pairs in pairs_by_name.items()}
    tied = {name: pairs_by_name[name][1][0] for name in aliases(config).values() if len(pairs_by_name[name]) > 1}
    expected = {key: origin.shape for pairs in pairs_by_name.values() for key, origin in pairs}
    # Names of the model's own kind must be its tensors: extra layers, biases and adapters are not.
    roots = tuple(prefix + root for root in _ROOTS[scheme])
    require_fit(
        tensors,
        expected,
        lambda key: not key.startswith(roots) or bool(_COMPUTED.search(key)),
        where=f"{where}, {config.family.value} under names of {scheme}",
        fix="Set model=NAME, its sizes with model.KEY=VALUE, and model.tie_word_embeddings=true for a missing output "
        "layer.",
    )
    ends = [f"state.{origin.name}.{kind}" for origin in next(iter(origins.values())) for kind in MOMENTS]
    root = _root(tensors, ends, ("optim.", "optimizer.", ""), "optimizers", where=where) if with_optimizer else None
    if root is not None:
        every = {*tensors, *values}
        moments = {
            f"{kind}.{name}": pairs[0]
            for kind in (*MOMENTS, STEP)
            for name, pairs in _present(every, origins, f"{root}state.", f".{kind}").items()
        }
        expected = {key: origin.shape for key, origin in moments.values() if not key.endswith(STEP)}
        require_fit(
            tensors,
            expected,
            lambda _: True,
            where=f"{where}, AdamW's state",
            fix="Save it from a run that trains all parameters, or import the weights alone with --weights-only.",
            differences=[f"missing: {key}" for key, _ in moments.values() if key not in every | expected.keys()],
        )
        keys |= moments
    return LocatedKeys(scheme, keys, tied, root is not None)


def _present(
    tensors: Container[str], origins: Mapping[str, Sequence[KeyOrigin]], start: str, end: str = ""
) -> dict[str, list[tuple[str, KeyOrigin]]]:
    """Return the keys that a folder has for each of our tensors, or else its first."""
    keyed = {name: [(start + o.name + end, o) for o in candidates] for name, candidates in origins.items()}
    return {name: [pair for pair in pairs if pair[0] in tensors] or pairs[:1] for name, pairs in keyed.items()}


def _scheme(
    tensors: Mapping[str, Sized], config: ModelConfig, *, where: object
) -> tuple[str, dict[str, list[KeyOrigin]], str]:
    """Return the folder's naming scheme, the origins under its names, and their prefix."""
    naming = {"transformers": lambda name, shape, _: [KeyOrigin(name, shape)], **_OTHER_SCHEMES.get(config.family, {})}
    schemes = {scheme: _origins(config, origins_of) for scheme, origins_of in naming.items()}
    anchors = {scheme: [origin.name for origin in next(iter(origins.values()))] for scheme, origins in schemes.items()}
    for scheme, origins in schemes.items():
        prefix = _root(tensors, anchors[scheme], ("", "model."), "models", where=where)
        if prefix is not None:
            return scheme, origins, prefix
    raise MismatchError(
        f"A DCP folder holds no model of family {config.family.value}",
        where=where,
        expected=f"a key that ends with {' or '.join(names[0] for names in anchors.values())}",
        found=f"{count_of(len(tensors), 'tensor')}: {few(tensors)}",
        fix="Set model=NAME, or put a config.json beside the folder.",
    )


def _origins(
    config: ModelConfig, origins_of: Callable[[str, Shape, ModelConfig], list[KeyOrigin]]
) -> dict[str, list[KeyOrigin]]:
    """Return each tensor's origins. A tied tensor may have either name."""
    origins = {name: origins_of(name, tensor.shape, config) for name, tensor in stored_tensors(config).items()}
    for alias, name in aliases(config).items():
        origins[name] += origins_of(alias, origins[name][0].shape, config)
    return origins


def _root(tensors: Iterable[str], ends: Sequence[str], usual: Sequence[str], noun: str, *, where: object) -> str | None:
    """Return the prefix of keys that end with any of `ends`, or None if there are none.

    Args:
        usual: Prefixes to prefer, best first.
        noun: What each prefix has one of, for a message.
    """
    roots = {key.removesuffix(end) for key in tensors for end in ends if key == end or key.endswith("." + end)}
    best = next((root for root in usual if root in roots), None)
    if best is None and len(roots) > 1:
        raise MismatchError(f"A DCP folder holds several {noun}", where=where, found=few(roots))
    return best if best is not None else next(iter(roots), None)


def optimizer_keys(keys: Iterable[str]) -> list[str]:
    """Return the optimizer state's keys, whatever the parameter names."""
    return [key for key in keys if re.search(r"(^|\.)state\..+\.\w+$", key)]


# Older releases' state dicts contain these, which can be computed: masks, rotary frequencies.
_COMPUTED = re.compile(r"(attn\.(masked_)?bias|rotary_emb\.inv_freq|freqs_cis|rope\.cache)$")
_ROOTS = {
    "transformers": ("transformer.", "model.", "lm_head."),
    "torchtitan": ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head."),
}


_OURS = re.compile(r"(?:model\.)?(layers\.\d+\.)?(.+)")
# Our names and torchtitan's, in a layer or outside. Newer releases have the second name for the output layer, release
# 0.3 for projections. Source: torchtitan/models/llama3/state_dict_adapter.py.
_TITAN = {
    "embed_tokens.weight": ("tok_embeddings.weight",),
    "norm.weight": ("norm.weight",),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
    "self_attn.q_proj.weight": ("attention.wq.weight", "attention.qkv_linear.wq.weight"),
    "self_attn.k_proj.weight": ("attention.wk.weight", "attention.qkv_linear.wk.weight"),
    "self_attn.v_proj.weight": ("attention.wv.weight", "attention.qkv_linear.wv.weight"),
    "self_attn.o_proj.weight": ("attention.wo.weight",),
    "mlp.gate_proj.weight": ("feed_forward.w1.weight",),
    "mlp.down_proj.weight": ("feed_forward.w2.weight",),
    "mlp.up_proj.weight": ("feed_forward.w3.weight",),
    "input_layernorm.weight": ("attention_norm.weight",),
    "post_attention_layernorm.weight": ("ffn_norm.weight",),
}
# Release 0.3 fuses these in the optimizer, and splits the weights.
_FUSED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def _torchtitan(name: str, shape: Shape, config: ModelConfig) -> list[KeyOrigin]:
    """Return our tensor's origins under torchtitan's LLaMA-3 names."""
    match = _OURS.fullmatch(name)
    assert match is not None
    layer, part = match.groups("")

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return halves_from_pairs(tensor, config.head_width) if part in _FUSED[:2] else tensor

    origins = [KeyOrigin(layer + titan_name, shape, take) for titan_name in _TITAN[part]]
    if part in _FUSED:
        number, rows = _FUSED.index(part), (config.n_head + 2 * config.n_kv_head) * config.head_width
        key = f"{layer}attention.qkv_linear.wqkv.weight"
        origins.append(KeyOrigin(key, (rows, *shape[1:]), lambda tensor: take(split_groups(tensor, config)[number])))
    return origins


_OTHER_SCHEMES = {Family.llama3: {"torchtitan": _torchtitan}}
