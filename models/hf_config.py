"""A family's `config.json` in transformers as data, used in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeAlias

from models.config import ModelConfig, RopeScaling

Json: TypeAlias = Mapping[str, Any]
_MOST = 1e30  # for any number in a configuration; `families.problems` has each number's bounds
_THETA = 10000.0  # where a file names none
_WHOLE = ("partial_rotary_factor", 1.0)
BEGIN, END = "bos_token_id", "eos_token_id"


@dataclass(frozen=True, slots=True)
class HfField:
    """A `ModelConfig` field under transformers' name.

    Args:
        default: The value for a file without the field, as in transformers. A function computes it from the earlier
            fields.
        names: Transformers' names for an enumeration's members. A member's first name is written.
        is_read: False for a second name, which is written and not read. Default True.
    """

    field: str
    hf_name: str
    default: Any = None
    names: Mapping[str, Enum] | None = None
    is_read: bool = True

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` members."""
        value = getattr(config, self.field)
        if self.names is not None:
            value = next(name for name, member in self.names.items() if member is value)
        return {self.hf_name: value}

    def read(self, table: Json, values: Json, problems: list[str]) -> dict[str, object]:
        """Return the `ModelConfig` fields; add an impossible value to `problems`."""
        if not self.is_read:
            return {}
        if self.names is not None:
            _refuse_others(table, self.hf_name, tuple(self.names), problems)
            return {self.field: self.names.get(str(table.get(self.hf_name)), self.default)}
        default = self.default(values) if callable(self.default) else self.default
        value = default if table.get(self.hf_name) is None else table[self.hf_name]
        return {self.field: _checked(self.hf_name, value, default, problems)}


@dataclass(frozen=True, slots=True)
class HfConstant:
    """A member independent of our fields, or computed from them. Our models write its first value.

    Args:
        allowed: The values with the same meaning, or a function that computes them from the fields.
    """

    hf_name: str
    allowed: tuple[object, ...] | Callable[[Json], tuple[object, ...]]
    is_written: bool = True

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` members."""
        return {self.hf_name: self._values(vars(config))[0]} if self.is_written else {}

    def read(self, table: Json, values: Json, problems: list[str]) -> dict[str, object]:
        """Return no field; add a value not allowed to `problems`."""
        if self.hf_name in table:
            _refuse_others(table, self.hf_name, self._values(values), problems)
        return {}

    def _values(self, values: Json) -> tuple[object, ...]:
        return self.allowed(values) if callable(self.allowed) else self.allowed


@dataclass(frozen=True, slots=True)
class HfRope:
    """The rotation: transformers 5 has `rope_parameters`, transformers 4 has `rope_theta` and `rope_scaling`.

    If a file has both, `rope_scaling` wins, as in version 5's `convert_rope_params_to_dict`.
    """

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` members for both versions."""
        scaling = None if config.rope_scaling is None else {"rope_type": "llama3", **asdict(config.rope_scaling)}
        return {
            "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
        }

    def read(self, table: Json, _: Json, problems: list[str]) -> dict[str, object]:
        """Return the `ModelConfig` fields; add an unsupported rotation to `problems`."""
        scaling = table.get("rope_scaling") or table.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            problems.append(f"rope_parameters={scaling!r}: not an object")
            return {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = _checked("rope_theta", scaling.get("rope_theta", table.get("rope_theta", _THETA)), 1.0, problems)
        like = asdict(RopeScaling())
        names = {"rope_type", "type", "rope_theta", *(like if kind == "llama3" else ())}
        if kind not in ("default", "llama3"):
            problems.append(f"rope_type={kind!r}: must be default or llama3")
            return {}
        extras = {name: scaling[name] for name in sorted(scaling.keys() - names)}
        problems += [f"rope_parameters.{n}={v!r}: not supported" for n, v in extras.items() if (n, v) != _WHOLE]
        if kind == "default":
            return {"rope_theta": theta, "rope_scaling": None}
        missing = like.keys() - scaling.keys()
        if missing:
            problems.append(f"rope_parameters: {', '.join(sorted(missing))} missing")
            return {}
        stretched: Any = {name: _checked(name, scaling[name], like[name], problems) for name in like}
        return {"rope_theta": theta, "rope_scaling": RopeScaling(**stretched)}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A family's `config.json`: its class and type, and its members in file order.

    Args:
        tokens: Transformers' token ids for a file without them.
        neutral: Members without a counterpart in our models, with their neutral value. The log names any other value.
    """

    architecture: str
    model_type: str
    members: tuple[HfField | HfConstant | HfRope, ...]
    tokens: Json
    neutral: Json

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` with which transformers opens the stored tensors."""
        table: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "float32",
        }
        for member in self.members:
            table |= member.write(config)
        return table | generation_members(config)

    def read(self, table: Json, generation: Json | None, problems: list[str]) -> dict[str, Any]:
        """Return the `ModelConfig` fields in a `config.json`; add unsupported members to `problems`.

        Another token in the vocabulary replaces a missing one.

        Args:
            generation: The `generation_config.json` beside it, whose end tokens count. None if it is missing.
        """
        values: dict[str, Any] = {}
        for member in sorted((*self.members, *_REFUSED), key=_depends_on_others):
            values |= member.read(table, values, problems)
        return values | _tokens({**self.tokens, **table}, generation, values["vocab_size"])

    def lost(self, table: Json, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` members, with their values, whose effect the model lacks."""
        second = {m.hf_name: getattr(config, m.field) for m in self.members if isinstance(m, HfField) and not m.is_read}
        members = {**self.neutral, **second}
        return {name: table[name] for name in members if table.get(name) not in (None, members[name])}


# transformers applies them to every family.
_REFUSED = (
    HfConstant("is_encoder_decoder", (False, None), is_written=False),
    HfConstant("partial_rotary_factor", (1.0, None), is_written=False),
    HfConstant("per_layer_config", (None,), is_written=False),
    HfConstant("quantization_config", (None,), is_written=False),
    HfConstant("transformers_weights", (None,), is_written=False),
)


def generation_members(config: ModelConfig) -> dict[str, object]:
    """Return the `generation_config.json` members; transformers stops generating at each end token."""
    ends = list(config.end_tokens)
    return {BEGIN: config.bos_token_id, END: ends if len(ends) > 1 else config.eos_token_id}


def _depends_on_others(member: object) -> bool:
    return not isinstance(member, HfField) or callable(member.default)


def _checked(name: str, value: object, like: object, problems: list[str]) -> object:
    """Return a value if it has `like`'s type; else note it and return `like`."""
    match like:
        case bool():
            is_fit = isinstance(value, bool)
        case int():
            is_fit = type(value) is int and 0 < value < 2**31
        case _:
            is_fit = type(value) in (int, float) and abs(value) <= _MOST  # type: ignore[arg-type]
    if not is_fit:
        problems.append(f"{name}={value!r}: not a valid {type(like).__name__}")
        return like
    return float(value) if isinstance(like, float) else value  # type: ignore[arg-type]


def _refuse_others(table: Json, name: str, allowed: tuple[object, ...], problems: list[str]) -> None:
    value = table.get(name, allowed[0])
    if value not in allowed:
        problems.append(f"{name}={value!r}: must be {' or '.join(map(repr, allowed))}")


def _ids(value: object) -> list[Any]:
    """Return the tokens in a member, which holds an id, a list or null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _tokens(table: Json, generation: Json | None, vocab_size: int) -> dict[str, object]:
    def ids_in(table: Json, name: str) -> list[int]:
        return [token for token in _ids(table.get(name)) if type(token) is int and 0 <= token < vocab_size]

    begins, config_ends = ids_in(table, BEGIN), ids_in(table, END)
    ends = (
        (config_ends if generation is None else ids_in(generation, END))
        or config_ends
        or begins[:1]
        or [vocab_size - 1]
    )
    end = config_ends[0] if config_ends and config_ends[0] in ends else ends[0]
    return {
        BEGIN: begins[0] if begins else end,
        END: end,
        "stop_token_ids": [token for token in dict.fromkeys(ends) if token != end] or None,
    }
