"""A family's `config.json` of transformers as data, used in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeAlias

from models.config import ModelConfig, RopeScaling

Json: TypeAlias = Mapping[str, Any]
_MOST = 1e30  # of any number in a configuration; `families.problems` has the bounds of each
_THETA = 10000.0  # where a file names none


@dataclass(frozen=True, slots=True)
class HfField:
    """A field of `ModelConfig` under transformers' name.

    Args:
        default: the value for a file without the field, as in transformers; a function computes it from the fields
            before.
        names: transformers' names of an enumeration's members; the first of a member is written.
        is_read: False for a second name, which is written and not read.
    """

    field: str
    hf_name: str
    default: Any = None
    names: Mapping[str, Enum] | None = None
    is_read: bool = True

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the members of `config.json`."""
        value = getattr(config, self.field)
        if self.names is not None:
            value = next(name for name, member in self.names.items() if member is value)
        return {self.hf_name: value}

    def read(self, table: Json, values: Json, problems: list[str]) -> dict[str, object]:
        """Return the fields of `ModelConfig`; add an impossible value to `problems`."""
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
    """A member independent of our fields: the first of the values is ours, the others mean the same."""

    hf_name: str
    allowed: tuple[object, ...]
    is_written: bool = True

    def write(self, _: ModelConfig) -> dict[str, object]:
        """Return the members of `config.json`."""
        return {self.hf_name: self.allowed[0]} if self.is_written else {}

    def read(self, table: Json, _: Json, problems: list[str]) -> dict[str, object]:
        """Return no field; add a value not allowed to `problems`."""
        _refuse_others(table, self.hf_name, self.allowed, problems)
        return {}


@dataclass(frozen=True, slots=True)
class HfDerived:
    """A member computed from other fields of `ModelConfig`; `meaning` is its formula in transformers' names."""

    hf_name: str
    value: Callable[[Json], object]
    meaning: str

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the members of `config.json`."""
        return {self.hf_name: self.value(vars(config))}

    def read(self, table: Json, values: Json, problems: list[str]) -> dict[str, object]:
        """Return no field; add any other value to `problems`."""
        value = table.get(self.hf_name)
        if value is not None and (isinstance(value, bool) or value != self.value(values)):
            problems.append(f"{self.hf_name}={value!r}: ours is {self.meaning}")
        return {}


@dataclass(frozen=True, slots=True)
class HfRope:
    """The rotation: version 5 of transformers has `rope_parameters`, version 4 `rope_theta` and `rope_scaling`."""

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the members of `config.json`, for both versions."""
        scaling = None if config.rope_scaling is None else {"rope_type": "llama3", **asdict(config.rope_scaling)}
        return {
            "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
        }

    def read(self, table: Json, _: Json, problems: list[str]) -> dict[str, object]:
        """Return the fields of `ModelConfig`; add an unsupported rotation to `problems`."""
        theta = table.get("rope_theta", _THETA)
        scaling = table.get("rope_parameters") or table.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            problems.append(f"rope_parameters={scaling!r}: no object")
            return {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = _checked("rope_theta", scaling.get("rope_theta", theta), 1.0, problems)
        if kind == "default":
            return {"rope_theta": theta, "rope_scaling": None}
        if kind != "llama3":
            problems.append(f"rope_type={kind!r}: ours is default or llama3")
            return {}
        missing = asdict(RopeScaling()).keys() - scaling.keys()
        if missing:
            problems.append(f"rope_parameters: {', '.join(sorted(missing))} missing")
            return {}
        like = asdict(RopeScaling())
        stretched: Any = {name: _checked(name, scaling[name], like[name], problems) for name in like}
        return {"rope_theta": theta, "rope_scaling": RopeScaling(**stretched)}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The `config.json` of a family: its class and type, and its members in the order of the file."""

    architecture: str
    model_type: str
    members: tuple[HfField | HfConstant | HfDerived | HfRope, ...]

    def write(self, config: ModelConfig) -> dict[str, object]:
        """Return the `config.json` with which transformers opens the stored tensors."""
        table: dict[str, object] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "float32",
        }
        for member in self.members:
            table |= member.write(config)
        return table | {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}

    def read(self, table: Json, problems: list[str]) -> dict[str, Any]:
        """Return the fields of `ModelConfig` in a `config.json`; add unsupported members to `problems`.

        Missing tokens, and lists of them, become another token of the vocabulary.
        """
        values: dict[str, Any] = {}
        for member in sorted(self.members, key=_depends_on_others):
            values |= member.read(table, values, problems)
        return values | _tokens(table, values["vocab_size"])

    def names(self) -> dict[str, str]:
        """Return transformers' names of the fields of `ModelConfig`; some fields have none."""
        names = {m.field: m.hf_name for m in self.members if isinstance(m, HfField) and m.is_read}
        rotates = any(isinstance(member, HfRope) for member in self.members)
        return names | (dict.fromkeys(("rope_theta", "rope_scaling"), "rope_parameters") if rotates else {})


def _depends_on_others(member: object) -> bool:
    return not isinstance(member, HfField) or callable(member.default)


def _checked(name: str, value: object, like: object, problems: list[str]) -> object:
    """Return a value of the kind of `like`; note any other, and return `like`."""
    match like:
        case bool():
            is_fit = isinstance(value, bool)
        case int():
            is_fit = type(value) is int and 0 < value < 2**31
        case _:
            is_fit = type(value) in (int, float) and abs(value) <= _MOST  # type: ignore[arg-type]
    if not is_fit:
        problems.append(f"{name}={value!r}: no {type(like).__name__} that a model has")
        return like
    return float(value) if isinstance(like, float) else value  # type: ignore[arg-type]


def _refuse_others(table: Json, name: str, allowed: tuple[object, ...], problems: list[str]) -> None:
    value = table.get(name, allowed[0])
    if value not in allowed:
        problems.append(f"{name}={value!r}: ours is {' or '.join(map(repr, allowed))}")


def _tokens(table: Json, vocab_size: int) -> dict[str, int]:
    def first(name: str) -> int | None:
        value = table.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int and 0 <= value < vocab_size else None

    end = first("eos_token_id")
    begin = first("bos_token_id")
    end = end if end is not None else begin if begin is not None else vocab_size - 1
    return {"bos_token_id": end if begin is None else begin, "eos_token_id": end}
