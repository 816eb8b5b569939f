"""Draws programs: a module, an optimizer with groups, a scheduler, and values and tensors of many kinds.

A drawn program may have one part that a checkpoint may refuse: its key is in `Program.refusable`.
"""

from __future__ import annotations

import collections
import enum
import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

# Each with what its constructor needs. The ones of other packages are left out where these are not installed.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.ASGD": {},
    "torch.optim.Adadelta": {},
    "torch.optim.Adafactor": {},
    "torch.optim.Adagrad": {},
    "torch.optim.Adam": {"amsgrad": True},
    "torch.optim.AdamW": {},
    "torch.optim.Adamax": {},
    "torch.optim.LBFGS": {},
    "torch.optim.Muon": {},
    "torch.optim.NAdam": {},
    "torch.optim.RAdam": {},
    "torch.optim.RMSprop": {"momentum": 0.9},
    "torch.optim.Rprop": {},
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.SparseAdam": {},
    "transformers.optimization.Adafactor": {"relative_step": False, "scale_parameter": False},
    "lion_pytorch.Lion": {},
    "prodigyopt.Prodigy": {},
    "schedulefree.AdamWScheduleFree": {},
}
# Whose step is of single elements, so that it works on shards.
ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD", "Lion")
_OF_MATRICES = ("torch.optim.Adafactor", "transformers.optimization.Adafactor", "prodigyopt.Prodigy")
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
}


class Color(enum.Enum):
    """An enum of a program."""

    RED = 1


class Marked(nn.Module):
    """A module with parameters and buffers of unusual kinds."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(draw.random()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.bf16 = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("steps", torch.tensor(draw.randrange(2**40)))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("octets", torch.arange(7, dtype=torch.uint8))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Extra(nn.Module):
    """A module with a state of its own."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@dataclass(slots=True)
class Program:
    """What a program holds.

    Args:
        refusable: keys of which one is named where a checkpoint refuses the program.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    refusable: set[str] = field(default_factory=set)

    def contents(self) -> dict[str, Any]:
        """Return all of it as one dict of live tensors and values."""
        extra = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "values": {**self.values, **extra},
            "tensors": self.tensors,
        }


def optimizer_class(name: str) -> Any:
    """Return the class of an optimizer; None where its package is not installed."""
    module, _, member = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), member)
    except ImportError:
        return None


def program(seed: str, mesh: DeviceMesh | None, *, spoiled: bool = False) -> Program:
    """Return the program of a seed on this rank, with its tensors distributed over a mesh.

    Args:
        spoiled: whether its tensors, numbers and values are others, under the same names.
    """
    draw = random.Random(seed)
    torch.manual_seed(draw.randrange(2**31))
    name = draw.choice([name for name in OPTIMIZERS if optimizer_class(name) is not None])
    special = draw.choice(["", "", "value", "tensor", "group", "extra"])
    is_elementwise = name.rpartition(".")[2] in ELEMENTWISE
    model, refusable = _model(draw, name, extra=special == "extra")
    places = random.Random(f"{seed}/{mesh}")
    if mesh is not None and is_elementwise:
        _distribute(model, mesh, places)
    groups = _groups(draw, model, name, special=special == "group", spoiled=spoiled)
    optimizer = optimizer_class(name)(groups, **OPTIMIZERS[name])
    steps = draw.choice([0, 1, 2])
    for step in range(1 if spoiled and steps else steps):
        _step(model, optimizer, seed=f"{seed}/{step}/{spoiled}", sparse="Sparse" in name)
    scheduler, kind = None, draw.choice(["", *SCHEDULERS])
    refusable |= {"mode_worse", "milestones"}
    if kind and name != "torch.optim.LBFGS":
        scheduler = SCHEDULERS[kind](optimizer)
        if not spoiled:
            scheduler.step(0.5) if kind == "ReduceLROnPlateau" else scheduler.step()
    values = {f"v{number}": _value(draw, 2) for number in range(draw.randint(0, 4))}
    tensors = {f"t{number}": _tensor(draw, mesh, places) for number in range(draw.randint(0, 4))}
    if special == "value":
        key = draw.choice(list(VALUES))
        values |= {key: VALUES[key]()}
        refusable.add(key)
    if special == "tensor":
        key = draw.choice(list(TENSORS))
        tensors |= {"nested": [{key: TENSORS[key]()}]}
        refusable.add(key)
    if special == "group":
        refusable.add("own_number")
    if name == "torch.optim.LBFGS":
        refusable |= {"old_dirs", "old_stps", "func_evals", "LBFGS"}
    if name == "schedulefree.AdamWScheduleFree":
        refusable |= {"train_mode"}
    made = Program(model, optimizer, scheduler, values, tensors, refusable)
    if spoiled:
        _spoil(made)
    return made


def _model(draw: random.Random, optimizer: str, *, extra: bool) -> tuple[nn.Module, set[str]]:
    layers = nn.ModuleDict({"first": nn.Linear(6, draw.randint(1, 9))})
    if optimizer == "torch.optim.Muon":  # takes matrices alone
        layers["second"] = nn.Linear(5, 3, bias=False)
        layers["first"] = nn.Linear(6, 4, bias=False)
        return layers, set()
    if optimizer == "torch.optim.SparseAdam":
        return nn.ModuleDict({"first": nn.Embedding(5, 4), "second": nn.Embedding(6, 2)}), set()
    for name, make in {
        "norm": lambda: nn.BatchNorm1d(5),
        "convolution": lambda: nn.Conv1d(2, 3, 3),
        "table": lambda: nn.Embedding(7, 4),
        "marked": lambda: Marked(draw),
    }.items():
        if draw.random() < 0.4 and not (name == "marked" and (optimizer in _OF_MATRICES)):
            layers[name] = make()
    if "table" in layers and draw.random() < 0.5:
        layers["head"] = nn.Linear(4, 7, bias=False)
        layers["head"].weight = layers["table"].weight
    refusable = set()
    if extra:
        layers["other"] = Extra(draw.choice([{"a": 1}, torch.arange(3), {"scale": torch.ones(2), "n": (1, 2)}, b"raw"]))
        refusable.add("_extra_state")
    return layers, refusable


def _distribute(model: nn.Module, mesh: DeviceMesh, draw: random.Random) -> None:
    """Replace parameters by DTensors, those that are tied by one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                local = distribute_tensor(parameter.data, mesh, placements(draw, parameter.dim(), mesh))
                made[id(parameter)] = nn.Parameter(local)
            setattr(module, name, made[id(parameter)])


def placements(draw: random.Random, dimensions: int, mesh: DeviceMesh) -> list[Placement]:
    """Return one placement for each dimension of a mesh."""
    kinds: list[Placement] = [Replicate(), *(Shard(dimension) for dimension in range(dimensions))]
    return [draw.choice(kinds) for _ in range(mesh.ndim)]


def mesh_of(kind: str, ranks: int) -> DeviceMesh | None:
    """Return the mesh of all ranks with one dimension, or with two where four are there; None for `plain`."""
    if kind == "plain" or not dist.is_initialized():
        return None
    return init_device_mesh("cpu", (2, 2) if kind == "grid" and ranks == 4 else (ranks,))


def _groups(
    draw: random.Random, model: nn.Module, optimizer: str, *, special: bool, spoiled: bool
) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    count = 1 if optimizer in ("torch.optim.LBFGS", "prodigyopt.Prodigy") else draw.randint(1, min(3, len(named)))
    groups = [{"params": named[number::count], "lr": 0.01 * (number + 1 + 5 * spoiled)} for number in range(count)]
    if special:
        value = draw.choice([None, (1, None), "text", [1, "a"], math.inf, math.nan, {"a": 1}, {1: 2}, torch.ones(())])
        groups[-1]["own_number"] = 1 if spoiled else value
    return groups


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: str, sparse: bool) -> None:
    torch.manual_seed(random.Random(seed).randrange(2**31))
    for parameter in model.parameters():
        value = torch.randn(parameter.shape).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = value.to_sparse() if sparse else value
    if getattr(optimizer, "train", None) is not None:
        optimizer.train()
    optimizer.step(lambda: torch.tensor(1.0))


def _value(draw: random.Random, depth: int) -> Any:
    kinds = [3, 2**70, -0.0, 1e-320, math.pi, True, None, "", "ünï", [], {}]
    if depth and draw.random() < 0.5:
        members = [_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return members if draw.random() < 0.5 else {f"k{draw.randrange(99)}": member for member in members}
    return draw.choice(kinds)


def _tensor(draw: random.Random, mesh: DeviceMesh | None, places: random.Random) -> Any:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
    shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(0, 3))]
    tensor = (torch.randn(shape) * 9).to(draw.choice(kinds))
    if tensor.dim() > 1 and draw.random() < 0.3:
        return torch.randn([shape[1], shape[0], *shape[2:]]).transpose(0, 1)
    if mesh is not None and places.random() < 0.5:
        tensor = distribute_tensor(tensor, mesh, placements(places, tensor.dim(), mesh))
    return [tensor] if draw.random() < 0.2 else tensor


def _spoil(made: Program) -> None:
    """Change every tensor and every value in place."""
    for tensor in tensors_of([made.model.state_dict(), made.optimizer.state_dict(), made.tensors]):
        fill(tensor, 0)
    made.values = {key: _spoiled(value) for key, value in made.values.items()}


def _spoiled(value: Any) -> Any:
    """Return a value of the same dicts and lists, with other leaves."""
    if type(value) is dict:
        return {key: _spoiled(member) for key, member in value.items()}
    return [_spoiled(member) for member in value] if type(value) is list else 7


def fill(tensor: torch.Tensor, number: int) -> None:
    """Fill a tensor, unless it is of a kind that cannot be filled."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout == torch.strided and not (local.is_nested or local.is_meta) and 0 not in local.stride():
        with torch.no_grad():
            local.fill_(number)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors of nested dicts, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    members: Sequence[object] = ()
    if isinstance(tree, dict):
        members = list(tree.values())
    elif isinstance(tree, list | tuple):
        members = tree
    return [tensor for member in members for tensor in tensors_of(member)]


VALUES: dict[str, Callable[[], Any]] = {
    "infinity": lambda: math.inf,
    "not_a_number": lambda: math.nan,
    "tuple": lambda: (1, (2, "a")),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({"a"}),
    "bytes": lambda: b"\x00\xff",
    "integer_keys": lambda: {1: "a", 2: {3: None}},
    "none_key": lambda: {None: 1},
    "boolean_keys": lambda: {True: 1, False: 0},
    "mixed_keys": lambda: {1: "a", "1": "b"},
    "tuple_keys": lambda: {(1, 2): 3},
    "size": lambda: torch.Size([2, 3]),
    "enum": lambda: Color.RED,
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "surrogate": lambda: "a\ud800",
    "complex": lambda: 1 + 2j,
    "numpy_scalar": lambda: np.float32(1.5),
    "numpy_array": lambda: np.arange(4, dtype=np.int16),
    "a_tensor": lambda: torch.arange(3.0),
    "ordered": lambda: collections.OrderedDict(b=1, a=2),
    "counter": lambda: collections.Counter("aab"),
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "object": object,
    "function": lambda: len,
    "range": lambda: range(3),
}


def _shared() -> list[torch.Tensor]:
    memory = torch.arange(6.0)
    return [memory[:4], memory[2:]]


TENSORS: dict[str, Callable[[], Any]] = {
    "complex64": lambda: torch.tensor([1 + 2j]),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "float8_fnuz": lambda: torch.ones(4).to(torch.float8_e5m2fnuz),
    "uint16": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "negative": lambda: torch._neg_view(torch.ones(3)),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj().imag,
    "strided": lambda: torch.arange(9.0)[::2],
    "shared": _shared,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested_tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "on_meta": lambda: torch.ones(3, device="meta"),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
}
