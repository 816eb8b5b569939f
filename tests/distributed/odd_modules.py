"""Modules with a `state_dict()` of their own, and optimizers with nested state, drawn at random."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

SIZE = 4


class _Scaled(nn.Linear):
    """A linear layer whose output is scaled by what is neither a parameter nor a buffer."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(SIZE, SIZE)
        self.scale: Any = torch.tensor([draw.uniform(0.5, 2) for _ in range(SIZE)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


class SavesMore(_Scaled):
    """It overrides `_save_to_state_dict` and `_load_from_state_dict`."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale", self.scale)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Overrides(_Scaled):
    """It overrides `state_dict` and `load_state_dict`; inside another module torch asks the first alone."""

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        found[f"{prefix}own"] = {"scale": self.scale, "kind": "float"}
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        rest = dict(state_dict)
        self.scale = rest.pop("own")["scale"]
        return super().load_state_dict(rest, *args, **options)


class Hooked(_Scaled):
    """A hook adds its scale, as numbers and as a tensor, and another takes them away."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state_dict: Any, prefix: str, _: Any) -> None:
        state_dict[f"{prefix}scale"] = module.scale.double()
        state_dict[f"{prefix}numbers"] = module.scale.tolist()

    @staticmethod
    def _take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        module.scale = state_dict.pop(f"{prefix}scale").float()
        assert state_dict.pop(f"{prefix}numbers") == module.scale.tolist()


class Extra(_Scaled):
    """It has extra state."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.form = draw.choice([lambda x: x, lambda x: {"scale": x, "n": (1, 2)}, lambda x: [x, None]])

    def get_extra_state(self) -> Any:
        return self.form(self.scale)

    def set_extra_state(self, state: Any) -> None:
        self.scale = state if isinstance(state, torch.Tensor) else next(iter(getattr(state, "values", state.copy)()))


class Renamed(_Scaled):
    """It stores its weight under another name, or its rows one by one, as views or as copies."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.scale = torch.ones(SIZE)
        self.split = draw.choice([lambda x: x.unbind(), lambda x: (x,)])
        self.register_state_dict_post_hook(self._store)
        self.register_load_state_dict_pre_hook(self._join)

    def parts(self, weight: torch.Tensor) -> Any:
        return (weight,) if isinstance(weight, DTensor) else self.split(weight)

    @staticmethod
    def _store(module: Any, state_dict: Any, prefix: str, _: Any) -> None:
        for number, row in enumerate(module.parts(state_dict.pop(f"{prefix}weight"))):
            state_dict[f"{prefix}{number}.row"] = row

    @staticmethod
    def _join(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        rows = [state_dict.pop(f"{prefix}{number}.row") for number, _ in enumerate(module.parts(module.weight))]
        state_dict[f"{prefix}weight"] = torch.stack(rows) if len(rows) > 1 else rows[0]


class Cast(_Scaled):
    """It gives its state dict in another dtype."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.scale = torch.ones(SIZE)
        self.register_state_dict_post_hook(self._cast)

    @staticmethod
    def _cast(_: Any, state_dict: Any, prefix: str, __: Any) -> None:
        for key in (f"{prefix}weight", f"{prefix}bias"):
            state_dict[key] = state_dict[key].half()


class Left(_Scaled):
    """It leaves its bias out of its state dict."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.scale = torch.ones(SIZE)
        self.register_state_dict_post_hook(self._leave)

    @staticmethod
    def _leave(_: Any, state_dict: Any, prefix: str, __: Any) -> None:
        del state_dict[f"{prefix}bias"]


class Packed(_Scaled):
    """It gives its weight as bytes, with a scale."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.pop(f"{prefix}weight")
        destination[f"{prefix}packed"] = (weight * 16).round().to(torch.int8)


class Turned(_Scaled):
    """It gives its weight transposed."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.scale = torch.ones(SIZE)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].T


class Sparse(nn.Module):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, SIZE, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(inputs[:, 0].abs().long() % 5)
        return found * inputs


def _plain(_: random.Random) -> nn.Module:
    return nn.Linear(SIZE, SIZE)


CARRIED = (_plain, Extra, Renamed, Cast, Left, Turned)
# Those that a checkpoint refuses, and the key that it names.
REFUSED = {SavesMore: "scale", Hooked: "scale", Overrides: "own", Packed: "packed"}
MODULES: list[Callable[[random.Random], nn.Module]] = [*CARRIED * 6, *REFUSED]


class Nested(torch.optim.Optimizer):
    """An optimizer whose state is nested at random: its steps read and change all of it."""

    def __init__(self, parameters: Any, seed: str, *, has_unstorable: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self._seed, self._has_unstorable = seed, has_unstorable

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            values = self.state[parameter]
            if not values:
                draw = random.Random(f"{self._seed}/{number}")
                values.update(
                    {key: self._made(draw, parameter, 2) for key in ("a", "b.c", "d/e")[: draw.randint(1, 3)]}
                )
                if draw.random() < 0.2:
                    values["tied"] = draw.choice([values["a"], parameter])
                if self._has_unstorable:
                    values["unstorable"] = draw.choice([collections.deque([1]), len, {"x": {torch.ones(1)}}])
            values["count"] = values.get("count", 0) + 1
            change = parameter.grad.clone()
            for leaf in tensors_in([values[key] for key in sorted(values) if key != "unstorable"]):
                if _address(leaf) != _address(parameter):
                    self._move(leaf, parameter.grad)
                    change += leaf.float().mean() if leaf.shape != parameter.shape else leaf.to(change.dtype)
            parameter.add_(change.nan_to_num().clamp(-1, 1), alpha=-self.param_groups[0]["lr"] / values["count"])
        return loss

    @staticmethod
    def _move(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if leaf.shape == gradient.shape:
            leaf.copy_((leaf.float() * 0.5 + gradient).clamp(-1, 1))
        elif leaf.is_floating_point():
            leaf.add_(1)
        else:
            leaf.bitwise_xor_(torch.ones_like(leaf))

    @staticmethod
    def _made(draw: random.Random, parameter: torch.Tensor, depth: int) -> Any:
        kind = draw.choice(
            ["like", "like", "tensor", "list", "tuple", "dict", "numbers"] if depth else ["like", "tensor"]
        )
        more = [Nested._made(draw, parameter, depth - 1) for _ in range(draw.randint(0, 3))] if depth else []
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]
        match kind:
            case "like":
                return torch.zeros_like(parameter, dtype=draw.choice(dtypes[:4]), requires_grad=False)
            case "tensor":
                rows = draw.choice([(), (0,), (3,), (5, *parameter.shape), (parameter.numel(), parameter.numel())])
                return torch.zeros(rows, dtype=draw.choice(dtypes))
            case "list":
                return more
            case "tuple":
                return (*more, None, "text")
            case "dict":
                keys = draw.choice([range, lambda n: [f"k{i}" for i in range(n)], lambda n: [f"{i}" for i in range(n)]])
                return draw.choice([dict, collections.OrderedDict])(zip(keys(len(more)), more, strict=True))
        return {"n": [1, 2.5, (3,)], "flag": True, "none": {}}


def _address(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member)
