"""Describes a Megatron checkpoint's model from the saving program's arguments. Pure.

Megatron-LM saves its parsed command line, `args`, in every checkpoint. Tensors do not reveal the whole model: head
count, GELU variant, rotary base, vocabulary padding. Source: `megatron/training/arguments.py`
(`core_transformer_config_from_args`) in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from models import families
from models.config import Activation, Family, ModelConfig, RopeScaling
from models.families import FAMILIES, has_field, spec_of
from models.megatron_names import POSITIONS
from reprise.errors import MismatchError
from reprise.storage import shown
from trainer.interop.formats import ImportOptions, listed
from trainer.interop.megatron.hybrid import as_gpt
from trainer.interop.megatron.names import names_of

# Our fields and the equivalent arguments, which an export writes too.
REQUIRED = {
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "norm_epsilon",
    "tie_word_embeddings": "untie_embeddings_and_output_weights",
}
OTHERS = {"initializer_range": "init_method_std", "vocab_size": "vocab_size"}
# Fields whose overrides win over the arguments.
_CHOSEN = ("vocab_size", "dropout", "bos_token_id", "eos_token_id")
# Fields that no tensor shows: an assumed value is logged.
_INVISIBLE = ("n_head", "norm_eps", "rope_theta", "activation", "bos_token_id", "eos_token_id")
_ROTARY_BASE = 10000.0  # Megatron's default
_ENDS = {128256: (128000, 128001)}  # by vocabulary size: the tokens that start and end a document
# Options unsupported by our models, with the values that turn them off.
_ABSENT = """
    num_experts multi_latent_attention apply_residual_connection_post_layernorm squared_relu quick_geglu mtp_num_layers
    window_size qk_l2_norm is_hybrid_model heterogeneous_layers_config_path activation_func_clamp_value
    glu_linear_offset attention_output_gate experimental_attention_variant no_rope_freq use_mup rotary_interleaved
""".split()  # noqa: SIM905
_LACKING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_ABSENT, (None, 0, False)),
    "softmax_type": (None, "vanilla"),
    "hybrid_override_pattern": (None, ""),
    "rotary_percent": (None, 1, 1.0),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """Our equivalent of a Megatron model.

    Args:
        adds_one: Whether norm weights are stored minus 1 (`apply_layernorm_1p`).
        notes: Log lines on allowed differences.
    """

    model: ModelConfig
    adds_one: bool
    notes: Sequence[str]


def describe(
    args: Mapping[str, Any],
    rows: int,
    options: ImportOptions,
    *,
    where: object,
    hybrid_layers: int | None = None,
) -> DescribedModel:
    """Return the model described by `args`.

    Fields missing from `args`, as in checkpoints from programs other than Megatron-LM, come from the overrides
    `model=...` and `model.KEY=...`.

    Args:
        args: Attributes of `args`. Empty if the checkpoint has none.
        rows: Embedding rows in the checkpoint, with padding.
        hybrid_layers: A `HybridModel`'s pairs of sub-blocks. None for a `GPTModel`.

    Raises:
        MismatchError: Our models lack an option, or a field has no value. The error lists all such options and fields.
    """
    args, problems = as_gpt(args, hybrid_layers)
    if args.get("use_rotary_position_embeddings"):  # older spelling
        args = {**args, POSITIONS: "rope"}
    configured = options.config.model
    overridden = {override.partition("=")[0].lstrip("+").removeprefix("model.") for override in options.overrides}
    settable = {field.name for field in fields(ModelConfig)} if "model" in overridden else overridden
    family, family_problems = _family(args, configured.family if "family" in settable else None, where=where)
    problems += [*family_problems, *_unsupported(args, family)]
    lacking = {key: name for key, name in REQUIRED.items() if args.get(name) is None and key not in settable}
    problems += [f"args have no {name}: set model.{key}" for key, name in lacking.items()]
    if problems or family is None:
        raise _model_mismatch(problems, where=where)
    stated = _stated(args, family)
    chosen = {key: getattr(configured, key) for key in _CHOSEN if key in overridden}
    absent = {field.name: field.default for field in fields(ModelConfig) if not has_field(family, field.name)}
    if FAMILIES[family].is_rotary and "rope_theta" not in settable:
        absent["rope_theta"] = _ROTARY_BASE
    model = replace(configured, **{**absent, "vocab_size": rows, **stated, **chosen, "family": family})
    begin, end = _ENDS.get(model.vocab_size, (model.vocab_size - 1,) * 2)
    model = replace(model, **{"bos_token_id": begin, "eos_token_id": end, **chosen})
    if "n_head" not in stated and "n_kv_head" in spec_of(model).follows:
        model = replace(model, n_kv_head=model.n_head)
    if not 0 < model.vocab_size <= rows:
        problems.append(f"vocab_size={model.vocab_size}: the embedding has {rows} rows; set model.vocab_size=N")
    if args.get("kv_channels") not in (None, model.head_width):
        problems.append(f"kv_channels={args['kv_channels']}: {family.value} has {model.head_width} here")
    if problems := [*problems, *families.problems(model)]:
        raise _model_mismatch(problems, where=where)
    assumed = [key for key in _INVISIBLE if has_field(family, key) and key not in overridden | stated.keys()]
    return DescribedModel(model, bool(args.get("apply_layernorm_1p")), _notes(args, model, rows, assumed))


def _stated(args: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields stated by `args`."""
    stated = {key: args[name] for key, name in {**REQUIRED, **OTHERS}.items() if args.get(name) is not None}
    if "tie_word_embeddings" in stated:
        stated["tie_word_embeddings"] = not stated["tie_word_embeddings"]
    if heads := stated.get("n_head"):
        groups = args.get("num_query_groups")
        stated["n_kv_head"] = groups if groups and args.get("group_query_attention", True) else heads
    width = args.get("kv_channels") or ((args.get("hidden_size") or 0) // heads if heads else 0)
    if width and has_field(family, "head_dim"):
        stated["head_dim"] = width
    if FAMILIES[family].is_rotary and args.get("rotary_base") is not None:
        stated["rope_theta"] = float(args["rotary_base"])
    if FAMILIES[family].is_rotary and "use_rope_scaling" in args:
        scaled = RopeScaling(factor=float(args.get("rope_scaling_factor") or 8.0))
        stated["rope_scaling"] = scaled if args["use_rope_scaling"] else None
    if has_field(family, "dropout") and args.get("hidden_dropout") is not None:
        stated["dropout"] = float(args["hidden_dropout"])
    if has_field(family, "activation") and {"bias_gelu_fusion", "openai_gelu"} & args.keys():
        # Megatron-Core fuses the tanh form with the bias. Megatron-LM's older models also have it for `openai_gelu`.
        is_tanh = args.get("bias_gelu_fusion") or (args.get("openai_gelu") and args.get("use_legacy_models"))
        stated["activation"] = Activation.gelu_tanh if is_tanh else Activation.gelu
    return stated


def _notes(args: Mapping[str, Any], model: ModelConfig, rows: int, assumed: Sequence[str]) -> list[str]:
    """Return log lines on allowed differences.

    Args:
        assumed: The fields that neither `args` nor overrides state.
    """
    notes = []
    if assumed:
        values = ((key, getattr(model, key)) for key in assumed)
        words = " ".join(f"model.{key}={getattr(value, 'value', value)}" for key, value in values)
        notes.append(f"neither args nor tensors show these fields, which are assumed: {words}")
    if model.vocab_size < rows:
        notes.append(
            f"{rows - model.vocab_size} of the embedding's {rows} rows are padding and are dropped; they took part in "
            "Megatron's softmax, so a loss equals Megatron's only if they have no probability. "
            f"model.vocab_size={rows} keeps them"
        )
    elif args.get("vocab_size") is None:
        notes.append(f"args name no vocabulary: all {rows} rows are kept; model.vocab_size=N keeps the first N")
    dropouts = {name: args.get(name) or 0 for name in ("hidden_dropout", "attention_dropout")}
    if set(dropouts.values()) != {model.dropout}:
        notes.append(
            f"{', '.join(f'{name}={value}' for name, value in dropouts.items())}; here model.dropout={model.dropout}"
        )
    return notes


def _family(args: Mapping[str, Any], configured: Family | None, *, where: object) -> tuple[Family | None, list[str]]:
    """Return the configured family or, by default, the best match for `args`, and the problems.

    `_unsupported` lists arguments contradicting a configured family.

    Raises:
        MismatchError: The configured family has no Megatron names.
    """
    if configured is not None:
        names_of(configured, where=where)
        return configured, []
    tables = {family: spec.megatron.arguments for family, spec in FAMILIES.items() if spec.megatron is not None}
    positions = args.get(POSITIONS) or "none"
    misfits = {family: _misfits(args, table) for family, table in tables.items() if positions in table[POSITIONS]}
    nearest = [family for family, count in misfits.items() if count == min(misfits.values())]
    if len(nearest) == 1:
        return nearest[0], []
    matches = " and ".join(family.value for family in nearest) or "no family"
    return None, [f"{POSITIONS}={shown(args.get(POSITIONS))}: args match {matches}; set model=NAME"]


def _misfits(args: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> int:
    """Count a family's arguments that `args` contradict or lack."""
    return sum(args.get(name) not in allowed for name, allowed in table.items())


def _unsupported(args: Mapping[str, Any], family: Family | None) -> Iterator[str]:
    names = None if family is None else FAMILIES[family].megatron
    required = {} if names is None else names.arguments
    for name, allowed in {**_LACKING, **required}.items():
        if name in args and args[name] not in allowed:
            reason = f"{family.value} requires {allowed[0]}" if family and name not in _LACKING else "not supported"
            yield f"{name}={shown(args[name])}: {reason}"


def _model_mismatch(problems: Sequence[str], *, where: object) -> MismatchError:
    is_lacking = any(problem.startswith("args have no ") for problem in problems)
    return MismatchError(
        "The Megatron checkpoint's model is unsupported or not fully described",
        where=where,
        found=listed(problems, "problem"),
        fix="\nSet fields missing from args with model=NAME and model.KEY=VALUE." if is_lacking else None,
    )
