"""Describes a Megatron checkpoint's model from the saving program's arguments. Pure.

Megatron-LM saves its parsed command line, `args`, in every checkpoint. Tensors do not reveal the whole model: head
count, GELU variant, rotary base, vocabulary padding. Source: `megatron/training/arguments.py`
(`core_transformer_config_from_args`) in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models import families
from models.config import Activation, Family, ModelConfig, RopeScaling
from models.families import FAMILIES, default_of, has_field, spec_of
from models.megatron_names import POSITIONS
from reprise.errors import MismatchError
from reprise.storage import finite_number, integer, shown
from trainer.interop.formats import ImportOptions, listed
from trainer.interop.megatron.hybrid import as_gpt, in_sub_blocks, pattern_of
from trainer.interop.megatron.names import Correspondence, correspondences, names_of

# Our fields and the equivalent arguments. All must be set, by `args` or by overrides.
_SIZES = {
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}
_NUMBERS = {"norm_eps": "norm_epsilon", "initializer_range": "init_method_std"}
# Arguments used in computations: integers, and numbers that may be fractions.
_INTEGERS = (*_SIZES.values(), "num_query_groups", "kv_channels", "vocab_size", "consumed_train_samples")
_FRACTIONS = (*_NUMBERS.values(), "rotary_base", "rope_scaling_factor", "hidden_dropout", "attention_dropout")
_ROTARY_BASE = 10000.0  # Megatron's default
_NONE = (None, 0, False)
# Options unsupported by our models, with the values that turn them off.
_LACKING: Mapping[str, tuple[object, ...]] = {
    "num_experts": _NONE,
    "multi_latent_attention": _NONE,
    "apply_residual_connection_post_layernorm": _NONE,
    "squared_relu": _NONE,
    "quick_geglu": _NONE,
    "mtp_num_layers": _NONE,
    "window_size": _NONE,
    "softmax_type": (None, "vanilla"),
    "qk_l2_norm": _NONE,
    "is_hybrid_model": _NONE,
    "hybrid_override_pattern": (None, ""),
    "heterogeneous_layers_config_path": _NONE,
    "activation_func_clamp_value": _NONE,
    "glu_linear_offset": _NONE,
    "attention_output_gate": _NONE,
    "experimental_attention_variant": _NONE,
    "no_rope_freq": _NONE,
    "use_mup": _NONE,
    "rotary_interleaved": _NONE,
    "rotary_percent": (None, 1, 1.0),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """Our equivalent of a Megatron model.

    Args:
        padded_vocab_size: Rows in Megatron's embedding, at least `model.vocab_size`.
        adds_one: Whether norm weights are stored minus 1 (`apply_layernorm_1p`).
        notes: Log lines on allowed differences.
        is_hybrid: Whether Megatron's model is a `HybridModel`, which numbers sub-blocks in place of layers.
    """

    model: ModelConfig
    padded_vocab_size: int
    adds_one: bool = False
    notes: tuple[str, ...] = field(default=())
    is_hybrid: bool = False

    def correspondences(self) -> list[Correspondence]:
        """Return every tensor in Megatron's model with ours."""
        tensors = correspondences(self.model, self.padded_vocab_size)
        return in_sub_blocks(tensors) if self.is_hybrid else tensors


def describe(
    args: Mapping[str, Any], rows: int, layers: int, options: ImportOptions, *, where: object, names: Iterable[str] = ()
) -> DescribedModel:
    """Return the model described by `args`.

    Fields missing from `args`, as in checkpoints from programs other than Megatron-LM, come from the overrides
    `model=...` and `model.KEY=...`.

    Args:
        args: Attributes of `args`. Empty if the checkpoint has none.
        rows: Embedding rows in the checkpoint, with padding.
        layers: Layers with tensors in the checkpoint. A model with more layers is refused.
        names: Tensor names, which identify a `HybridModel`.

    Raises:
        MismatchError: Our models lack an option, or a field has no value. The error lists all such options and fields.
    """
    pattern = pattern_of(names)
    args, problems = as_gpt(args, pattern)
    if args.get("use_rotary_position_embeddings"):  # older spelling
        args = {**args, POSITIONS: "rope"}
    family, family_problems = _family(args, options, where=where)
    problems += family_problems
    problems += _out_of_range(args)
    problems += _unsupported(args, family)
    problems += _missing_fields(args, options)
    problems += _vocabulary(args, rows, options)
    if problems or family is None:
        raise _model_mismatch(problems, where=where)
    notes = list[str]()
    vocab_size = _vocab_size(args, rows, options, notes)
    model = replace(
        options.config.model,
        family=family,
        **{key: args[argument] for key, argument in (_SIZES | _NUMBERS).items() if args.get(argument) is not None},
        **_heads(args, options.config.model),
        **_positions(args, family, options),
        vocab_size=vocab_size,
    )
    if args.get("untie_embeddings_and_output_weights") is not None:
        model = replace(model, tie_word_embeddings=not args["untie_embeddings_and_output_weights"])
    if "n_kv_head" in spec_of(model).follows:
        model = replace(model, n_kv_head=_groups(args, model))
    activation = _activation(args, options, notes) if has_field(family, "activation") else default_of("activation")
    model = replace(model, activation=activation)
    if not has_field(family, "head_dim"):
        model = replace(model, head_dim=default_of("head_dim"))
    notes += _assumed_fields(args, model, options)
    model = _tokens(_dropout(model, args, options, notes), options, notes)
    if model.n_layer > layers:
        raise _model_mismatch([f"num_layers={model.n_layer}: the checkpoint has {layers}"], where=where)
    if contradictions := [*families.problems(model), *_width(args, model)]:
        raise _model_mismatch(contradictions, where=where)
    return DescribedModel(model, rows, bool(args.get("apply_layernorm_1p")), tuple(notes), pattern is not None)


def _family(args: Mapping[str, Any], options: ImportOptions, *, where: object) -> tuple[Family | None, list[str]]:
    """Return the family from an override or, by default, the best match for `args`, and the problems.

    `_unsupported` lists arguments contradicting an override.

    Raises:
        MismatchError: The override names a family without Megatron names.
    """
    if _is_named(options, "family"):
        names_of(options.config.model.family, where=where)
        return options.config.model.family, []
    tables = {family: spec.megatron.arguments for family, spec in FAMILIES.items() if spec.megatron is not None}
    positions = args.get(POSITIONS)
    expected = " or ".join(dict.fromkeys(str(table[POSITIONS][0]) for table in tables.values()))
    if positions is None:
        return None, [f"args have no {POSITIONS}, {expected}: set model=NAME"]
    fits = {family: _fit(args, table) for family, table in tables.items() if positions in table[POSITIONS]}
    if not fits:
        return None, [f"{POSITIONS}={shown(positions)}: must be {expected}"]
    nearest = [family for family, fit in fits.items() if fit == min(fits.values())]
    if len(nearest) > 1:
        return None, [f"args match {' and '.join(family.value for family in nearest)} equally well: set model=NAME"]
    return nearest[0], []


def _fit(args: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> tuple[int, int]:
    """Count a family's arguments contradicted by `args`, and those not confirmed by `args`."""
    values = {name: args.get(name) in allowed for name, allowed in table.items()}
    return sum(name in args and not fits for name, fits in values.items()), sum(not fits for fits in values.values())


def _out_of_range(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments outside the usable range."""
    checks: dict[str, Callable[[object], object]] = {
        **dict.fromkeys(_INTEGERS, integer),
        **dict.fromkeys(_FRACTIONS, finite_number),
    }
    for name, check in checks.items():
        if args.get(name) is not None:
            try:
                check(args[name])
            except ValueError as error:
                yield f"{name}: {error}"


def _unsupported(args: Mapping[str, Any], family: Family | None) -> Iterator[str]:
    names = None if family is None else FAMILIES[family].megatron
    for name, allowed in {**_LACKING, **({} if names is None else names.arguments)}.items():
        if name in args and args[name] not in allowed:
            reason = "not supported"
            if family is not None and name not in _LACKING:
                reason = f"{family.value} requires {allowed[0]}"
            yield f"{name}={shown(args[name])}: {reason}"


def _missing_fields(args: Mapping[str, Any], options: ImportOptions) -> Iterator[str]:
    """Yield fields set neither by `args` nor by overrides."""
    switches = {"norm_eps": "norm_epsilon", "tie_word_embeddings": "untie_embeddings_and_output_weights"}
    for key, argument in (_SIZES | switches).items():
        if args.get(argument) is None and not _is_named(options, key):
            yield f"args have no {argument}: set model.{key}"


def _vocabulary(args: Mapping[str, Any], rows: int, options: ImportOptions) -> Iterator[str]:
    """Yield a line if the vocabulary exceeds the embedding rows, unless an override sets another size."""
    vocab_size = args.get("vocab_size")
    if isinstance(vocab_size, int) and not 0 < vocab_size <= rows and not _is_set(options, "vocab_size"):
        yield (
            f"vocab_size={vocab_size}: the embedding has {rows} rows; model.vocab_size=N names another "
            f"number of tokens, at most {rows}"
        )


def _assumed_fields(args: Mapping[str, Any], model: ModelConfig, options: ImportOptions) -> Iterator[str]:
    """Yield lines on fields missing in `args` and invisible in tensor shapes, unless an override sets them."""
    fields = {"n_head": "num_attention_heads", "norm_eps": "norm_epsilon"}
    if spec_of(model).is_rotary:
        fields["rope_theta"] = "rotary_base"
    for key, argument in fields.items():
        if args.get(argument) is None and not _is_set(options, key):
            yield f"args have no {argument}, and no tensor shows it: assumed to be model.{key}={getattr(model, key)}"


def _is_named(options: ImportOptions, key: str) -> bool:
    """Return whether an override sets a model field, directly or through a whole model."""
    names = {override.partition("=")[0].lstrip("+") for override in options.overrides}
    return "model" in names or f"model.{key}" in names


def _is_set(options: ImportOptions, key: str) -> bool:
    """Return whether an override sets this model field directly."""
    return any(override.partition("=")[0].lstrip("+") == f"model.{key}" for override in options.overrides)


def _vocab_size(args: Mapping[str, Any], rows: int, options: ImportOptions, notes: list[str]) -> int:
    """Return our vocabulary size, and note padding rows."""
    saved = args.get("vocab_size")
    true = saved if isinstance(saved, int) else None
    if _is_set(options, "vocab_size"):
        chosen = options.config.model.vocab_size
        size = chosen if 0 < chosen <= rows else rows  # comparing the two models refuses any other size
    elif true is None:
        notes.append(
            f"args name no vocabulary: all {rows} rows of the embedding are kept, as they took part in Megatron's "
            "softmax; if some are padding, model.vocab_size=N keeps the first N"
        )
        return rows
    else:
        size = true
    if size < rows:
        notes.append(
            f"{rows - size} of the embedding's {rows} rows are padding and are dropped; they took part in Megatron's "
            f"softmax, so a loss equals Megatron's only if they have no probability. model.vocab_size={rows} "
            "keeps them"
        )
    return size


def _heads(args: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    fields = dict[str, Any]()
    if (heads := args.get("num_attention_heads")) is not None:
        groups = args.get("num_query_groups")
        fields["n_kv_head"] = groups if groups and args.get("group_query_attention", True) else heads
    if args.get("kv_channels") is not None:
        fields["head_dim"] = args["kv_channels"]
    elif args.get("hidden_size") and heads:
        fields["head_dim"] = args["hidden_size"] // heads
    else:
        fields["head_dim"] = model.head_dim
    return fields


def _groups(args: Mapping[str, Any], model: ModelConfig) -> int:
    """Return the query groups for a family with a group per head. `problems` refuses any other number."""
    return model.n_kv_head if args.get("num_attention_heads") is not None else model.n_head


def _width(args: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    channels = args.get("kv_channels")
    if channels is not None and channels != model.head_width:
        yield f"kv_channels={channels}: {model.family.value} has hidden_size / num_attention_heads={model.head_width}"


def _positions(args: Mapping[str, Any], family: Family, options: ImportOptions) -> dict[str, Any]:
    if not FAMILIES[family].is_rotary:
        return {"rope_scaling": None}
    fields = dict[str, Any]()
    if args.get("rotary_base") is not None:
        fields["rope_theta"] = float(args["rotary_base"])
    elif not _is_named(options, "rope_theta"):
        fields["rope_theta"] = _ROTARY_BASE
    if "use_rope_scaling" in args:
        scaled = RopeScaling(factor=float(args.get("rope_scaling_factor") or 8.0))
        fields["rope_scaling"] = scaled if args["use_rope_scaling"] else None
    return fields


def _activation(args: Mapping[str, Any], options: ImportOptions, notes: list[str]) -> Activation:
    """Return the GELU variant.

    Megatron-Core computes the tanh form when it fuses GELU with the bias. Megatron-LM's older models also do so for
    `openai_gelu`.
    """
    if "bias_gelu_fusion" not in args and "openai_gelu" not in args:
        chosen = options.config.model.activation
        if not _is_set(options, "activation"):
            notes.append(
                f"args do not name the GELU variant: assumed to be model.activation={chosen.value}. Megatron computes "
                "gelu_tanh if it fuses bias and GELU (its default), else gelu"
            )
        return chosen
    is_tanh = args.get("bias_gelu_fusion") or (args.get("openai_gelu") and args.get("use_legacy_models"))
    return Activation.gelu_tanh if is_tanh else Activation.gelu


def _dropout(model: ModelConfig, args: Mapping[str, Any], options: ImportOptions, notes: list[str]) -> ModelConfig:
    """Return the model with Megatron's dropout, or the override's."""
    hidden, attention = args.get("hidden_dropout"), args.get("attention_dropout")
    if not has_field(model.family, "dropout"):
        if hidden or attention:
            notes.append(f"hidden_dropout={hidden}, attention_dropout={attention} are not carried: {_NO_DROPOUT}")
        return replace(model, dropout=0.0)
    if hidden is None or _is_set(options, "dropout"):
        return model
    if attention not in (None, hidden):
        notes.append(f"model.dropout={hidden} is hidden_dropout; attention_dropout={attention} is not carried")
    return replace(model, dropout=float(hidden))


_NO_DROPOUT = "the family has no dropout here"
# By vocabulary size: the tokens that start and end a document.
_TOKENS = {128256: (128000, 128001)}


def _tokens(model: ModelConfig, options: ImportOptions, notes: list[str]) -> ModelConfig:
    """Return the model with its document start and end tokens, from overrides or the vocabulary size."""
    begin, end = _TOKENS.get(model.vocab_size, (model.vocab_size - 1,) * 2)
    chosen: dict[str, Any] = {
        "bos_token_id": options.config.model.bos_token_id if _is_set(options, "bos_token_id") else begin,
        "eos_token_id": options.config.model.eos_token_id if _is_set(options, "eos_token_id") else end,
    }
    if not (_is_set(options, "bos_token_id") and _is_set(options, "eos_token_id")):
        listed = " ".join(f"model.{name}={token}" for name, token in chosen.items())
        notes.append(f"args do not name a document's start and end tokens: assumed to be {listed}")
    return replace(model, **chosen)


def _model_mismatch(problems: Sequence[str], *, where: object) -> MismatchError:
    is_lacking = any(problem.startswith("args have no ") for problem in problems)
    return MismatchError(
        "The Megatron checkpoint's model is unsupported or not fully described",
        where=where,
        found=listed(problems, "problem"),
        fix="\nSet fields missing from args with model=NAME and model.KEY=VALUE." if is_lacking else None,
    )
