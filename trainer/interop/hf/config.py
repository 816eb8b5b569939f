"""Which model a `config.json` of transformers describes, and how it differs from ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from models.config import Activation, Family, ModelConfig, RopeScaling
from models.config import problems as model_problems
from trainer.checkpoint.format.json_file import Json
from trainer.errors import MismatchError

# Defaults: `GPT2Config` and `LlamaConfig` of transformers, which a file need not repeat.
_GPT2_FIELDS = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "vocab_size": ("vocab_size", 50257),
    "max_position_embeddings": ("n_positions", 1024),
    "tie_word_embeddings": ("tie_word_embeddings", True),
    "dropout": ("resid_pdrop", 0.1),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "initializer_range": ("initializer_range", 0.02),
}
_LLAMA_FIELDS = {
    "n_layer": ("num_hidden_layers", 32),
    "n_head": ("num_attention_heads", 32),
    "n_embd": ("hidden_size", 4096),
    "intermediate_size": ("intermediate_size", 11008),
    "vocab_size": ("vocab_size", 32000),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "initializer_range": ("initializer_range", 0.02),
}
# What our models do not have, and the only values that mean its absence.
_GPT2_ONLY: dict[str, tuple[object, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_ACTIVATIONS = {
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu": Activation.gelu,
}
_LLAMA_ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
_MOST = 1e30  # of any number in a configuration; `models.problems` has the bounds of each
_THETA = 10000.0  # of a LLaMA configuration that names none
# What says nothing of the tensors and nothing of the result: it may differ, and a line says so.
_FREE = ("dropout", "initializer_range", "bos_token_id", "eos_token_id")


def read_model(table: Json, *, where: object) -> ModelConfig:
    """Return the model that a `config.json` describes.

    Tokens that are missing or no single number, as they may be there, become another that is in the vocabulary.

    Raises:
        MismatchError: listing everything in it that our models do not have, or that is no such value.
    """
    found: list[str] = []
    match table.get("model_type"):
        case "gpt2":
            values = _gpt2(table, found)
        case "llama":
            values = _llama(table, found)
        case other:
            raise MismatchError(
                "A folder holds a model of another family", where=where, expected="gpt2 or llama", found=repr(other)
            )
    if not found:
        model = ModelConfig(**{**values, **_tokens(table, values["vocab_size"])})
        found = model_problems(model)
        if not found:
            return model
    raise MismatchError(
        "A folder holds a model that ours cannot be",
        where=where,
        found="what ours does not have:\n" + "\n".join(f"  {problem}" for problem in found),
    )


def differences(theirs: ModelConfig, ours: ModelConfig, *, where: object, kind: str = "folder") -> list[str]:
    """Return lines on what differs and may.

    Args:
        kind: what holds the model, for messages; only a folder has names of its own for the fields of a model.

    Raises:
        MismatchError: listing every field that differs and may not, with both values and how to set ours.
    """
    if theirs.family is not ours.family:
        raise MismatchError(
            f"The {kind} holds a model of another family",
            where=where,
            expected=f"model.family={ours.family.value}",
            found=theirs.family.value + (" (model_type)" if kind == "folder" else ""),
            fix="Choose one with model=.",
        )
    fields = _flat(_GPT2_FIELDS if ours.family is Family.gpt2 else _LLAMA_FIELDS) if kind == "folder" else {}
    said, refused = [], []
    there, here = (asdict(model) | {"activation": model.activation.value} for model in (theirs, ours))
    for name in here:
        if name in ("family", "pad_vocab_multiple") or there[name] == here[name]:
            continue
        if name == "vocab_size" and there[name] == ours.padded_vocab_size:
            said.append(f"rows {ours.vocab_size} to {theirs.vocab_size} of the vocabulary are padding, left out")
        elif name in _FREE:
            said.append(f"model.{name}: {there[name]} there, {here[name]} here")
        elif not (name == "n_kv_head" and ours.family is Family.gpt2):  # is n_head then
            origin = f" ({fields[name]})" if fields.get(name, name) != name else ""
            refused.append(
                f"  model.{name}: {there[name]} there{origin}, {here[name]} here  ({_setting(name, there, here)})"
            )
    if refused:
        raise MismatchError(
            f"The {kind} holds another model than the one configured",
            where=where,
            found="these differences:\n" + "\n".join(refused),
            fix=f"\nSet what is named in brackets, or name another {kind} with checkpoint.load.",
        )
    return said


def _flat(fields: Mapping[str, tuple[str, object]]) -> dict[str, str]:
    more = {
        "activation": "activation_function",
        "intermediate_size": "n_inner",
        "n_kv_head": "num_key_value_heads",
        "rope_theta": "rope_parameters",
    }
    return {**more, "rope_scaling": "rope_parameters", **{name: theirs for name, (theirs, _) in fields.items()}}


def _setting(name: str, there: Mapping[str, object], here: Mapping[str, object]) -> str:
    value = there[name]
    if isinstance(value, Mapping):
        members = ",".join(f"{key}:{member}" for key, member in value.items())
        begin = "" if here[name] is not None else "on a model= that has one, such as llama3_1b, "
        return f"{begin}'model.{name}={{{members}}}' sets it"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"model.{name}={text} sets it"


def _gpt2(table: Json, found: list[str]) -> Json:
    values = _take(table, _GPT2_FIELDS, found)
    _refuse_others(table, _GPT2_ONLY, found)
    inner = table.get("n_inner")
    values["intermediate_size"] = _checked("n_inner", 4 * values["n_embd"] if inner is None else inner, 1, found)
    _refuse_others(table, {"activation_function": tuple(_ACTIVATIONS)}, found)
    activation = _ACTIVATIONS.get(str(table.get("activation_function")), Activation.gelu_tanh)
    return {"family": Family.gpt2, "n_kv_head": values["n_head"], "activation": activation, **values}


def _llama(table: Json, found: list[str]) -> Json:
    values = _take(table, _LLAMA_FIELDS, found)
    _refuse_others(table, _LLAMA_ONLY, found)
    heads, groups = values["n_head"], table.get("num_key_value_heads")
    values["n_kv_head"] = _checked("num_key_value_heads", heads if groups is None else groups, 1, found)
    width = table.get("head_dim")
    if width is not None and (type(width) is not int or width * heads != values["n_embd"]):
        found.append(f"head_dim={width!r}: ours is hidden_size / num_attention_heads")
    return {"family": Family.llama3, **values, **_rope(table, found)}


def _rope(table: Json, found: list[str]) -> Json:
    """Read the rotation: version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`."""
    theta = table.get("rope_theta", _THETA)
    scaling = table.get("rope_parameters") or table.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        found.append(f"rope_parameters={scaling!r}: no object")
        return {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _checked("rope_theta", scaling.get("rope_theta", theta), 1.0, found)
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        found.append(f"rope_type={kind!r}: ours is default or llama3")
        return {}
    missing = asdict(RopeScaling()).keys() - scaling.keys()
    if missing:
        found.append(f"rope_parameters: {', '.join(sorted(missing))} missing")
        return {}
    stretched: Json = {name: _checked(name, scaling[name], like, found) for name, like in asdict(RopeScaling()).items()}
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**stretched)}


def _take(table: Json, fields: Mapping[str, tuple[str, object]], found: list[str]) -> Json:
    return {
        ours: _checked(name, default if table.get(name) is None else table[name], default, found)
        for ours, (name, default) in fields.items()
    }


def _checked(name: str, value: object, like: object, found: list[str]) -> object:
    """Return a value of the kind of `like`; note one that is not, and return `like`."""
    match like:
        case bool():
            is_fit = isinstance(value, bool)
        case int():
            is_fit = type(value) is int and 0 < value < 2**31
        case _:
            is_fit = type(value) in (int, float) and abs(value) <= _MOST  # type: ignore[arg-type]
    if not is_fit:
        found.append(f"{name}={value!r}: no {type(like).__name__} that a model has")
        return like
    return float(value) if isinstance(like, float) else value  # type: ignore[arg-type]


def _refuse_others(table: Json, only: Mapping[str, tuple[object, ...]], found: list[str]) -> None:
    for name, allowed in only.items():
        value = table.get(name, allowed[0])
        if value not in allowed:
            found.append(f"{name}={value!r}: ours is {' or '.join(map(repr, allowed))}")


def _tokens(table: Json, vocab_size: int) -> dict[str, int]:
    def first(name: str) -> int | None:
        value = table.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int and 0 <= value < vocab_size else None

    end = first("eos_token_id")
    begin = first("bos_token_id")
    end = end if end is not None else begin if begin is not None else vocab_size - 1
    return {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
