"""Maps the keys of a DCP folder to our tensors, by names and shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from models.config import Family, ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import MismatchError, count_of
from trainer.interop.formats import listed
from trainer.interop.projections import halves_from_pairs, split_groups

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeyOrigin:
    """Where our tensor comes from: the other program's name, its tensor's shape, and the part to take.

    `take` maps a tensor with `shape` to ours, for weights and moments alike.
    """

    name: str
    shape: Shape
    take: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LocatedKeys:
    """A model's tensors in a folder.

    Args:
        scheme: The program whose names the folder uses.
        keys: The folder's key, and the part to take, for each tensor, moment and step.
        tied: The second key, for each tied tensor stored twice.
        has_optimizer: Whether `keys` include moments and steps.
        unmatched: Keys belonging to neither the model nor its optimizer.
    """

    scheme: str
    keys: Mapping[str, tuple[str, KeyOrigin]]
    tied: Mapping[str, str]
    has_optimizer: bool
    unmatched: frozenset[str]


def locate(
    shapes: Mapping[str, Shape], config: ModelConfig, *, where: object, with_optimizer: bool = True
) -> LocatedKeys:
    """Find a model's tensors, and its optimizer's, among keys with any prefix.

    Args:
        shapes: The folder's tensor shapes, by key.
        with_optimizer: Whether to look for optimizer state.

    Raises:
        MismatchError: The folder does not fit the model: another family, missing or unexpected tensors, other shapes,
            or optimizer state for only some parameters. The error lists all problems.
    """
    scheme, origins, prefix = _scheme(shapes, config, where=where)
    problems = list[str]()
    keys = dict[str, tuple[str, KeyOrigin]]()
    alias_of = {name: alias for alias, name in aliases(config).items()}
    tied = dict[str, str]()
    for name, candidates in origins.items():
        present = [(prefix + o.name, o) for o in candidates if prefix + o.name in shapes]
        if not present:
            problems.append(f"{prefix}{candidates[0].name}: missing")
            continue
        keys[name] = present[0]
        if name in alias_of and len(present) > 1:
            tied[name] = present[1][0]
        problems += [_shape_problem(key, shapes[key], o.shape) for key, o in present if shapes[key] != o.shape]
    used = {key for key, _ in keys.values()} | set(tied.values())
    problems += [f"{key}: not part of the model" for key in _unexpected_keys(shapes, prefix, scheme, used)]
    if problems:
        raise _model_mismatch(problems, scheme, config, where=where)
    root = _optimizer_root(shapes, next(iter(origins.values())), where=where) if with_optimizer else None
    if root is not None:
        moments, problems = _locate_moments(shapes, origins, root)
        if problems:
            raise MismatchError(
                "A DCP folder holds AdamW state for only part of the model",
                where=where,
                expected=f"{', '.join(MOMENTS)} and {STEP} for every parameter",
                found=listed(problems, "difference"),
                fix="Save it from a run that trains all parameters, or import the weights alone with --weights-only.",
            )
        keys |= moments
        used |= {key for key, _ in moments.values()}
    return LocatedKeys(scheme, keys, tied, root is not None, frozenset(shapes) - used)


def _scheme(
    shapes: Mapping[str, Shape], config: ModelConfig, *, where: object
) -> tuple[str, dict[str, list[KeyOrigin]], str]:
    """Return the folder's naming scheme, the origins under its names, and their prefix."""
    naming = {"transformers": _transformers, **_OTHER_SCHEMES.get(config.family, {})}
    schemes = {scheme: origins_of(config) for scheme, origins_of in naming.items()}
    for scheme, origins in schemes.items():
        anchors = [origin.name for origin in next(iter(origins.values()))]
        prefixes = {key.removesuffix(a) for key in shapes for a in anchors if key == a or key.endswith("." + a)}
        for usual in ("", "model."):
            if usual in prefixes:
                return scheme, origins, usual
        if len(prefixes) == 1:
            return scheme, origins, prefixes.pop()
        if prefixes:
            raise MismatchError(
                "A DCP folder holds several models",
                where=where,
                expected="one, or one under `model.`",
                found=", ".join(sorted(prefixes)),
            )
    sample = ", ".join(sorted(shapes)[:5]) or "no tensor"
    anchors = [next(iter(origins.values()))[0].name for origins in schemes.values()]
    raise MismatchError(
        f"A DCP folder holds no model of family {config.family.value}",
        where=where,
        expected=f"a key that ends with {' or '.join(anchors)}",
        found=f"{count_of(len(shapes), 'tensor')}: {sample} ...",
        fix="Set model=NAME, or put a config.json beside the folder.",
    )


def _locate_moments(
    shapes: Mapping[str, Shape], origins: Mapping[str, Sequence[KeyOrigin]], root: str
) -> tuple[dict[str, tuple[str, KeyOrigin]], list[str]]:
    keys, problems = dict[str, tuple[str, KeyOrigin]](), list[str]()
    for name, candidates in origins.items():
        present = [(f"{root}state.{origin.name}", origin) for origin in candidates]
        state, origin = next(((key, o) for key, o in present if f"{key}.{MOMENTS[0]}" in shapes), present[0])
        for kind in (*MOMENTS, STEP):
            key = f"{state}.{kind}"
            keys[f"{kind}.{name}"] = (key, origin)
            if key not in shapes:
                problems.append(f"{key}: missing")
            elif kind == STEP and math.prod(shapes[key]) != 1:
                problems.append(_shape_problem(key, shapes[key], ()))
            elif kind != STEP and shapes[key] != origin.shape:
                problems.append(_shape_problem(key, shapes[key], origin.shape))
    return keys, problems


def _optimizer_root(shapes: Mapping[str, Shape], anchors: Sequence[KeyOrigin], *, where: object) -> str | None:
    """Return the prefix before `state.` in the optimizer's keys, or None without optimizer state by name."""
    ends = [f"state.{origin.name}.{kind}" for origin in anchors for kind in MOMENTS]
    roots = {key.removesuffix(end) for key in shapes for end in ends if key == end or key.endswith("." + end)}
    for usual in ("optim.", "optimizer.", ""):
        if usual in roots:
            return usual
    if len(roots) > 1:
        raise MismatchError(
            "A DCP folder holds several optimizers",
            where=where,
            expected="one, or one under `optim.` or `optimizer.`",
            found=", ".join(sorted(roots)),
        )
    return roots.pop() if roots else None


def is_numbered(keys: Set[str]) -> bool:
    """Return whether optimizer state is stored by parameter number, as in `Optimizer.state_dict`."""
    return any(re.search(rf"(^|\.)state\.\d+\.{MOMENTS[0]}$", key) for key in keys)


def optimizer_keys(keys: Iterable[str]) -> list[str]:
    """Return the optimizer state's keys, whatever the parameter names."""
    return [key for key in keys if re.search(r"(^|\.)state\..+\.\w+$", key)]


# Older releases' state dicts contain these, which can be computed: masks, rotary frequencies.
_COMPUTED = re.compile(r"(attn\.(masked_)?bias|rotary_emb\.inv_freq|freqs_cis|rope\.cache)$")
_ROOTS = {
    "transformers": ("transformer.", "model.", "lm_head."),
    "torchtitan": ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head."),
}


def _unexpected_keys(shapes: Mapping[str, Shape], prefix: str, scheme: str, used: Set[str]) -> Iterator[str]:
    """Yield unexpected tensors under the model's own names: extra layers, biases, adapters."""
    for key in shapes:
        is_ours = key.startswith(tuple(prefix + root for root in _ROOTS[scheme]))
        if is_ours and key not in used and not _COMPUTED.search(key):
            yield key


def _shape_problem(key: str, actual: Shape, expected: Shape) -> str:
    return f"{key}: shape {list(actual)}, expected {list(expected)}"


def _model_mismatch(problems: Sequence[str], scheme: str, config: ModelConfig, *, where: object) -> MismatchError:
    is_tied = len(problems) == 1 and problems[0].endswith(("lm_head.weight: missing", "output.weight: missing"))
    return MismatchError(
        "The DCP folder holds a different model",
        where=where,
        expected=f"{config.family.value} under {possessive(scheme)} names, as model.* describe it",
        found=listed(problems, "difference"),
        fix="The output layer is tied: set model.tie_word_embeddings=true."
        if is_tied
        else "Set model=NAME, and its sizes with model.KEY=VALUE.",
    )


def possessive(program: str) -> str:
    """Return a program name's possessive form."""
    return f"{program}'" if program.endswith("s") else f"{program}'s"


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _transformers(config: ModelConfig) -> dict[str, list[KeyOrigin]]:
    """Return the origins under our own names, which are transformers'. A tied tensor may have either name."""
    alias_of = {stored: alias for alias, stored in aliases(config).items()}
    return {
        name: [KeyOrigin(n, tensor.shape, _unchanged) for n in ([name, alias_of[name]] if name in alias_of else [name])]
        for name, tensor in stored_tensors(config).items()
    }


# Source: torchtitan/models/llama3/state_dict_adapter.py; in a pair, newer releases use the second name.
_TITAN_ENDS = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
}
_TITAN_BLOCK = {
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_TITAN_ATTENTION = {
    "self_attn.q_proj.weight": "wq",
    "self_attn.k_proj.weight": "wk",
    "self_attn.v_proj.weight": "wv",
}


def _torchtitan(config: ModelConfig) -> dict[str, list[KeyOrigin]]:
    """Return the origins under torchtitan's LLaMA-3 names."""
    alias_of = {stored: alias for alias, stored in aliases(config).items()}
    origins = dict[str, list[KeyOrigin]]()
    for name, tensor in stored_tensors(config).items():
        if name in _TITAN_ENDS:
            names = [*_TITAN_ENDS[name], *_TITAN_ENDS.get(alias_of.get(name, ""), ())]
            origins[name] = [KeyOrigin(titan_name, tensor.shape, _unchanged) for titan_name in names]
            continue
        layer, part = name.removeprefix("model.layers.").split(".", maxsplit=1)
        if part in _TITAN_BLOCK:
            origins[name] = [KeyOrigin(f"layers.{layer}.{_TITAN_BLOCK[part]}", tensor.shape, _unchanged)]
        else:
            origins[name] = _titan_attention(config, layer, part, tensor.shape)
    return origins


_OTHER_SCHEMES = {Family.llama3: {"torchtitan": _torchtitan}}


def _titan_attention(config: ModelConfig, layer: str, part: str, shape: Shape) -> list[KeyOrigin]:
    """Return a projection's origins. Release 0.3 fuses the three in the optimizer, and splits the weights."""
    projection, root = _TITAN_ATTENTION[part], f"layers.{layer}.attention."
    take = _unchanged if projection == "wv" else (lambda tensor: halves_from_pairs(tensor, config.head_width))
    number = list(_TITAN_ATTENTION).index(part)
    fused = (config.n_head + 2 * config.n_kv_head) * config.head_width, *shape[1:]
    return [
        *(KeyOrigin(f"{root}{inner}{projection}.weight", shape, take) for inner in ("", "qkv_linear.")),
        KeyOrigin(f"{root}qkv_linear.wqkv.weight", fused, lambda tensor: take(split_groups(tensor, config)[number])),
    ]
