"""All optimizers in one table: their state per parameter, and the `optimizer` keys that set them. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from models.adapters import saved_tensors
from models.config import ModelConfig, StoredTensor
from models.families import block_matrices, stored_tensors
from reprise.format import StoredDtype
from trainer.config.dtype import Dtype
from trainer.config.optimizer import OptimizerName, OptimizerSection

Shape: TypeAlias = tuple[int, ...]

AVERAGE = "ema"  # the state key for a parameter's moving average


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer's properties, apart from its step.

    Args:
        name: The name in `trainer_state.json`.
        state: Returns the tensors it keeps for a parameter, by torch's key, given the parameter's shape and whether it
            is a block matrix. A tensor either has the parameter's shape and `moments_dtype`, or is a float32 scalar.
        numbers: The sections in `trainer_state.json` with its settings. Each maps names there to `optimizer` keys.
    """

    name: str
    state: Callable[[Shape, bool], dict[str, Shape]]
    numbers: Mapping[str, Mapping[str, str]]


def _adamw_state(shape: Shape, _: bool) -> dict[str, Shape]:
    return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}


def _muon_state(shape: Shape, is_block_matrix: bool) -> dict[str, Shape]:
    return {"momentum_buffer": shape} if is_block_matrix else _adamw_state(shape, is_block_matrix)


_MUON = {key: f"muon_{key}" for key in ("momentum", "ns_steps", "match_rms_adamw")}
_ADAM = {"weight_decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps"}
OPTIMIZERS: dict[OptimizerName, OptimizerSpec] = {
    OptimizerName.adamw: OptimizerSpec("AdamW", _adamw_state, {"adam": _ADAM}),
    OptimizerName.muon: OptimizerSpec("Muon", _muon_state, {"adam": _ADAM, "muon": _MUON}),
}
# All sections in `trainer_state.json` with optimizer settings.
SECTIONS = tuple(dict.fromkeys(section for spec in OPTIMIZERS.values() for section in spec.numbers))
MOMENTS = {Dtype.float32: StoredDtype.F32, Dtype.bfloat16: StoredDtype.BF16}


@dataclass(frozen=True, slots=True)
class StateTensor:
    """An optimizer tensor on disk: the state `key` for `parameter`."""

    key: str
    parameter: str
    stored: StoredTensor
    dtype: StoredDtype

    @property
    def name(self) -> str:
        return f"{self.key}.{self.parameter}"


def state_tensors(
    section: OptimizerSection, model: ModelConfig, frozen: Collection[str] = (), *, averages: bool = False
) -> Iterator[StateTensor]:
    """Yield every optimizer state tensor in file order: by key, scalars last, then in model order.

    Args:
        frozen: Parameters without an optimizer, by name.
        averages: Whether each parameter has a moving average.
    """
    stored, matrices, state = saved_tensors(model), block_matrices(model), OPTIMIZERS[section.name].state
    shapes_by_name = {
        name: state(tensor.shape, name in matrices) | ({AVERAGE: tensor.shape} if averages else {})
        for name, tensor in stored.items()
        if name not in frozen
    }
    scalars = {key: not shape for shapes in shapes_by_name.values() for key, shape in shapes.items()}
    for key in sorted(scalars, key=lambda key: (scalars[key], key)):
        for name, shapes in shapes_by_name.items():
            if key in shapes:
                dtype = StoredDtype.F32 if scalars[key] or key == AVERAGE else MOMENTS[section.moments_dtype]
                yield StateTensor(key, name, StoredTensor.plain() if scalars[key] else stored[name], dtype)


def no_decay_names(model: ModelConfig) -> frozenset[str]:
    """Return the parameters without weight decay: biases and norms. Only matrices, as stored, decay."""
    return frozenset(name for name, tensor in stored_tensors(model).items() if len(tensor.shape) < 2)


def settings_record(section: OptimizerSection) -> dict[str, dict[str, object]]:
    """Return the sections in `trainer_state.json` with the settings."""
    numbers = OPTIMIZERS[section.name].numbers
    return {name: {their: getattr(section, key) for their, key in keys.items()} for name, keys in numbers.items()}


def optimizer_record(model: ModelConfig, section: OptimizerSection, frozen: Collection[str] = ()) -> dict[str, Any]:
    """Return the optimizer's name and groups: parameters with weight decay, then those without.

    The moments' dtype is a member too, unless it is float32.

    Args:
        frozen: Parameters without an optimizer, by name. They are in no group.
    """
    no_decay, names = no_decay_names(model), [name for name in saved_tensors(model) if name not in frozen]
    is_float32 = section.moments_dtype is Dtype.float32
    return {
        "name": OPTIMIZERS[section.name].name,
        **({} if is_float32 else {"moments_dtype": section.moments_dtype.value}),
        "groups": [
            {"weight_decay": section.weight_decay, "names": [name for name in names if name not in no_decay]},
            {"weight_decay": 0.0, "names": [name for name in names if name in no_decay]},
        ],
    }
