"""Random programs, saved and loaded into others: the state and the next steps have equal bits, or a key is named.

A program is a module, an optimizer, values and tensors; what a checkpoint may refuse of it is in `Program.refusable`.
Its modules are odd ones, or plain ones whose state dicts a call is given. Optimizers are those of `torch.optim`,
of `pytorch_optimizer` and `torch_optimizer` where they are installed, and made-up ones. A case runs on one to four
ranks, by one of the calls, and is a function of its number and the seed.
"""

from __future__ import annotations

import collections
import copy
import enum
import importlib
import json
import math
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from tests.distributed.odd_modules import MODULES, REFUSED, SIZE, Extra, Nested, Renamed, Sparse, tensors_in
from tests.distributed.programs import process_group
from tests.harness import call_on_ranks
from tests.states import differences

WAYS = (
    "save",
    "save_state_dict",
    "AsyncSaver.save",
    "AsyncSaver.save_state_dict",
    "state",
    "dicts",
    "AsyncSaver dicts",
)
PACKAGES = ("torch.optim", "pytorch_optimizer", "torch_optimizer")
STEPS = 3  # after the load
# What their constructors need.
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.RMSprop": {"momentum": 0.9},
    "torch.optim.Adam": {"amsgrad": True},
    "torch.optim.LBFGS": {"max_iter": 2, "history_size": 3},
    "pytorch_optimizer.LBFGS": {"max_iter": 2, "history_size": 3},
    "pytorch_optimizer.Ranger21": {"num_iterations": 20},
}
# Whose step is of single elements, so that it works on shards and in groups of any parameters.
_ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD"
ELEMENTWISE = tuple(f"torch.optim.{name}" for name in _ELEMENTWISE.split())


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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale + self.bf16.float().mean()


def _norm(_: random.Random) -> nn.Module:
    return nn.BatchNorm1d(SIZE)


def _linear(_: random.Random) -> nn.Module:
    return nn.Linear(SIZE, SIZE)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and where it is saved and loaded; an optimizer without a name is made up.

    Args:
        layouts: of the parameters at the save and at the load: `plain`, `fsdp`, or placed at random on a `line` or a
            `grid` of ranks.
    """

    seed: str
    optimizer: str
    ranks: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("plain", "plain")

    @property
    def way(self) -> str:
        """Return the call that saves."""
        return random.Random(f"{self.seed}/way").choice(WAYS)

    @property
    def is_placed(self) -> bool:
        """Return whether gradients are drawn, as no forward pass takes plain tensors and placed ones."""
        return not {*self.layouts} <= {"plain", "fsdp"}


@cache
def optimizers() -> tuple[str, ...]:
    """Return the names of the optimizers that are installed."""
    names = []
    for package in PACKAGES:
        with suppress(ImportError):
            for name, kind in sorted(vars(importlib.import_module(package)).items()):
                if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                    names += [f"{package}.{name}"] if kind is not torch.optim.Optimizer else []
    return tuple(names)


def case_of(seed: int, number: int, *, ranks: int = 1) -> Case:
    """Return the case of a number on up to so many ranks: of three, one makes its optimizer up."""
    draw, names = random.Random(f"{seed}/{number}"), optimizers()
    layouts = draw.choice([["plain"], ["fsdp"], ["plain", "line", "grid"]])
    layout = (draw.choice(layouts), draw.choice(layouts))
    if "fsdp" in layout:
        ranks = min(ranks, 2)  # the mean of the gradients of three equal ranks is rounded
    if layout != ("plain", "plain"):
        names = ELEMENTWISE if "fsdp" not in layout else ("torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adagrad")
    name = "" if number % 3 == 2 else names[(number - number // 3) % len(names)]
    return Case(f"{seed}/{number}", name, (draw.randint(1, ranks), draw.randint(1, ranks)), layout)


class Program:
    """The module, the optimizer, the values and the tensors of a case, on this rank.

    Args:
        place: 0 at the save; at the load 1, where all of them are others under the same names.
    """

    def __init__(self, case: Case, place: int) -> None:
        draw, own = random.Random(case.seed), random.Random(f"{case.seed}/{place}")
        layout, self.is_other = case.layouts[place], place == 1
        special = draw.choice(["", "", "value", "tensor", "group"])
        modules: list[Any] = [*MODULES, *[Marked] * 3, *[_norm] * 3]
        if "dicts" in case.way:
            modules = [_linear, _norm, Extra, Marked]
        left_out = {"plain": [], "fsdp": [Marked, Renamed]}.get(case.layouts[0], [Renamed])
        modules = [module for module in modules if module not in left_out]
        kinds = [draw.choice(modules) for _ in range(draw.randint(1, 3))]
        self.refusable = {REFUSED[kind] for kind in kinds if kind in REFUSED}
        self.refusable |= {"_extra_state"} if Extra in kinds and "dicts" in case.way else set()
        torch.manual_seed(own.randrange(2**31))
        layers = [_shaped_as(kind, own, random.Random(case.seed)) for kind in kinds]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(SIZE, SIZE, bias=False))
        if case.optimizer == "torch.optim.SparseAdam":
            self.model = Sparse()
        if draw.random() < 0.2:
            self.model = nn.Sequential(self.model, self.model)
        self.is_placed, mesh = case.is_placed, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            if layout == "fsdp":
                fully_shard(self.model)
            elif layout != "plain":
                size = dist.get_world_size()
                mesh = init_device_mesh("cpu", (2, 2) if (layout, size) == ("grid", 4) else (size,))
                _distribute(self.model, mesh, own)
        self.steps = draw.randint(0, 3)
        if case.optimizer:
            self.optimizer = _optimizer(case.optimizer, self.model, draw, rate=0.05 if self.is_other else 0.01)
            if not case.optimizer.startswith("torch.optim.") or case.optimizer.endswith("LBFGS"):
                self.refusable |= {"(/optimizer", "(/its", "found key "}
        else:
            has_unstorable = draw.random() < 0.1
            self.optimizer = Nested(self.model.parameters(), case.seed, has_unstorable=has_unstorable)
            self.refusable |= {"unstorable"} if has_unstorable else set()
        values = {f"v{number}": _value(draw, 2) for number in range(draw.randint(0, 4))}
        self.tensors = {f"t{number}": _tensor(draw, mesh, own) for number in range(draw.randint(0, 4))}
        if special == "value":
            values |= self._odd(draw, VALUES)
        if special == "tensor":
            self.tensors |= {"nested": [self._odd(draw, TENSORS)]}
        if special == "group":
            value = draw.choice([None, (1, None), "text", [1, "a"], math.inf, math.nan, {1: 2}, torch.ones(())])
            self.optimizer.param_groups[-1]["own_number"] = 1 if self.is_other else value
            self.refusable.add("own_number")
        self.values: dict[str, Any] = _spoiled(values) if self.is_other else values
        for tensor in tensors_in(self.tensors) if self.is_other else ():
            fill(tensor, 0)

    def _odd(self, draw: random.Random, kinds: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        key = draw.choice(list(kinds))
        self.refusable.add(key)
        return {key: kinds[key]()}

    def run(self, first: int, steps: int) -> list[Any]:
        """Run so many steps, and return their losses and the state after them."""
        np.random.seed(first)
        random.seed(first)
        losses = []
        for number in range(first, first + steps):
            torch.manual_seed(number)
            loss = self.optimizer.step(self._backward)
            losses.append(None if loss is None else float(loss))
        parameters = whole(dict(self.model.named_parameters()))
        with torch.no_grad():
            return [losses, parameters, None if self.is_placed else whole(self.model(torch.ones(2, SIZE)))]

    @torch.enable_grad()
    def _backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        if self.is_placed:
            for parameter in self.model.parameters():
                value = torch.randn(parameter.shape).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.grad = value
            return torch.tensor(1.0)
        inputs = torch.randn(8, SIZE)
        loss: torch.Tensor = (self.model(inputs) - inputs.roll(1)).square().mean()
        kind = type(self.optimizer).__name__.lower()
        loss.backward(create_graph="hessian" in kind or "sophia" in kind)  # type: ignore[no-untyped-call]
        return loss

    def given(self, *, as_dicts: bool) -> dict[str, Any]:
        """Return all of it as a call is given it."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if as_dicts:
            parts = {key: part.state_dict() for key, part in parts.items()}
        return {**parts, "values": self.values, "tensors": self.tensors}

    def change(self) -> None:
        """Change every tensor and value, as what goes on beside a save."""
        for tensor in tensors_in([self.model.state_dict(), self.optimizer.state_dict(), self.tensors]):
            fill(tensor, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = 77.0
        for value in self.values.values():
            if isinstance(value, list):
                value.append("later")
            elif isinstance(value, dict):
                value["later"] = 1


def _shaped_as(kind: Callable[[random.Random], nn.Module], own: random.Random, shape: random.Random) -> nn.Module:
    """Return a module with numbers of its own, and choices of form from the case."""
    module, model = kind(own), kind(shape)
    for name in ("form", "split"):
        if hasattr(module, name):
            setattr(module, name, getattr(model, name))
    return module


def _optimizer(name: str, model: nn.Module, draw: random.Random, *, rate: float) -> torch.optim.Optimizer:
    """Return an optimizer by the first way in which its class takes parameters.

    Raises:
        TypeError: if it takes them in none of these ways.
    """
    package, _, member = name.rpartition(".")
    kind, options = getattr(importlib.import_module(package), member), OPTIONS.get(name, {})
    parameters, named = list(model.parameters()), list(model.named_parameters())
    if name in ELEMENTWISE:
        count = draw.randint(1, min(3, len(named)))
        groups = [{"params": named[number::count], "lr": rate * (number + 1)} for number in range(count)]
        return kind(groups, **options)  # type: ignore[no-any-return]
    matrices, rest = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
    if member == "SpectralSphere":
        parameters = matrices
    groups = [{"params": matrices, "use_muon": True}, *([{"params": rest, "use_muon": False}] if rest else ())]
    ways: list[Callable[[], Any]] = [
        lambda: kind(parameters, **options),
        lambda: kind(matrices),
        lambda: kind(groups),
        lambda: kind(model),
        lambda: kind(parameters, num_data=8),
        lambda: kind(parameters, base_optimizer=torch.optim.AdamW),
        lambda: kind(torch.optim.AdamW(parameters)),
        lambda: kind(model, parameters, torch.optim.AdamW),
    ]
    for way in ways:
        with suppress(Exception):  # how it wants them
            made = way()
            if isinstance(made, torch.optim.Optimizer):
                getattr(made, "train", lambda: None)()
                return made
    raise TypeError(f"{name} takes parameters otherwise")


def _distribute(model: nn.Module, mesh: DeviceMesh, draw: random.Random) -> None:
    """Replace parameters by DTensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = distribute_tensor(parameter.data, mesh, placements(draw, parameter.dim(), mesh))
            setattr(module, name, nn.Parameter(local))


def placements(draw: random.Random, dimensions: int, mesh: DeviceMesh) -> list[Placement]:
    """Return one placement for each dimension of a mesh."""
    kinds: list[Placement] = [Replicate(), *(Shard(dimension) for dimension in range(dimensions))]
    return [draw.choice(kinds) for _ in range(mesh.ndim)]


def _value(draw: random.Random, depth: int) -> Any:
    if depth and draw.random() < 0.5:
        members = [_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return members if draw.random() < 0.5 else {f"k{draw.randrange(99)}": member for member in members}
    return draw.choice([3, 2**70, -0.0, 1e-320, math.pi, True, None, "", "ünï", [], {}])


def _spoiled(value: Any) -> Any:
    """Return a value of the same dicts and lists, with other leaves."""
    if type(value) is dict:
        return {key: _spoiled(member) for key, member in value.items()}
    return [_spoiled(member) for member in value] if type(value) is list else 7


def _tensor(draw: random.Random, mesh: DeviceMesh | None, places: random.Random) -> Any:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
    shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(0, 3))]
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    tensor = (torch.randn(shape, generator=generator) * 9).to(draw.choice(kinds))
    if tensor.dim() > 1 and draw.random() < 0.3:
        return torch.zeros([shape[1], shape[0], *shape[2:]], dtype=tensor.dtype).transpose(0, 1).copy_(tensor)
    if mesh is not None and places.random() < 0.5:
        tensor = distribute_tensor(tensor, mesh, placements(places, tensor.dim(), mesh))
    return [tensor] if draw.random() < 0.2 else tensor


def fill(tensor: torch.Tensor, number: int) -> None:
    """Fill a tensor, unless it is of a kind that cannot be filled."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout == torch.strided and not (local.is_nested or local.is_meta) and 0 not in local.stride():
        with torch.no_grad():
            local.fill_(number)


def whole(tree: Any) -> Any:
    """Return a copy of nested state with whole tensors. A call of all ranks."""
    if isinstance(tree, DTensor):
        return tree.detach().full_tensor().clone()
    if isinstance(tree, torch.Tensor):
        is_plain = not tree.is_meta and tree.layout == torch.strided and not tree.is_nested
        return tree.detach().resolve_neg().resolve_conj().clone() if is_plain else tree
    if isinstance(tree, dict):
        made = copy.copy(tree)
        made.update((key, whole(member)) for key, member in tree.items())
        return made
    if type(tree) in (list, tuple, set, frozenset):
        return type(tree)(whole(member) for member in tree)
    return tree if callable(tree) else copy.deepcopy(tree)


def _copied(contents: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with whole tensors, and an optimizer's state in one order. A call of all ranks."""
    optimizer = contents["optimizer"]
    state = {key: sorted(values.items()) for key, values in sorted(optimizer["state"].items())}
    return whole({**contents, "optimizer": {**optimizer, "state": state}})  # type: ignore[no-any-return]


def _answer(call: Callable[[], None], refusable: Collection[str]) -> dict[str, Any]:
    """Return what became of a call: done, refused by one of these names, or wrong."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it says is the outcome
        text = f"{type(error).__name__}: {error}"
        is_named = any(key in text for key in refusable)
        return {"outcome": "refused" if is_named else "wrong", "text": text}
    return {"outcome": "done", "text": ""}


def _stepped(case: Case) -> Program:
    program = Program(case, 0)
    program.run(100, program.steps)
    return program


def _save(case: Case, folder: Path) -> dict[str, Any]:
    """Save a case, and note its state and what its next steps are. A call of all ranks."""
    if case.optimizer and not _works(case):
        return {"outcome": "no use", "text": f"{case.optimizer} cannot be stepped so"}
    program = _stepped(case)
    expected = [_copied(program.given(as_dicts=True)), _stepped(case).run(200, STEPS)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(expected, folder / "expected.pt")

    def call() -> None:
        saver: Any = AsyncSaver(folder) if "Async" in case.way else nullcontext()
        with saver:
            if case.way == "save":
                save(folder, program.model, program.optimizer, iteration=1, state=program.values)
            elif case.way == "state":
                state = {"part": program.model, "its": program.optimizer, "values": program.values}
                save(folder, nn.Linear(1, 1), iteration=1, state=state)
            elif case.way == "AsyncSaver.save":
                saver.save(1, program.model, program.optimizer, state=program.values)
            else:
                more = {"model": program.model} if "dicts" in case.way else {}
                if "Async" in case.way:
                    saver.save_state_dict(1, program.given(as_dicts="dicts" in case.way), **more)
                else:
                    save_state_dict(folder, program.given(as_dicts="dicts" in case.way), iteration=1, **more)
            if "Async" in case.way:
                program.change()

    return _answer(call, program.refusable)


def _load(case: Case, folder: Path) -> dict[str, Any]:
    """Load a case into another program, and compare its state and its next steps. A call of all ranks."""
    program = Program(case, 1)
    program.run(300, min(program.steps, len(case.seed) % 2))
    state, steps = torch.load(folder / "expected.pt", weights_only=False)

    given = program.given(as_dicts="dicts" in case.way)

    def call() -> None:
        if case.way == "state":
            parts = {"part": program.model, "its": program.optimizer}
            program.values = dict(load(folder, nn.Linear(1, 1), state=parts))["values"]
        elif "save" in case.way and "dict" not in case.way:
            program.values = dict(load(folder, program.model, program.optimizer))
            program.values.pop("iteration")
        else:
            load_state_dict(folder, given, **({"model": program.model} if "dicts" in case.way else {}))
            program.values = given["values"]

    told = _answer(call, program.refusable & {"own_number"})  # what was saved can be loaded
    if told["outcome"] != "done":
        return told
    found = _copied({**program.given(as_dicts=True), **(given if "dicts" in case.way else {})})
    if case.way in ("save", "AsyncSaver.save", "state"):
        found.pop("tensors"), state.pop("tensors")
    wrong = differences(state, found, "state")
    if "dicts" not in case.way:  # whose parts the program has yet to load
        wrong += differences(steps, program.run(200, STEPS), "steps")
    if wrong and (not case.optimizer or dist.is_initialized() or _resumes_by_torch(case)):
        return {"outcome": "wrong", "text": "; ".join(wrong[:3])}
    return {"outcome": "not by torch either", "text": case.optimizer} if wrong else told


def _works(case: Case) -> bool:
    """Return whether an optimizer can be stepped, and does the same twice."""
    try:
        Program(case, 0).optimizer.state_dict()
        first, second = (Program(case, 0).run(100, 4) for _ in range(2))
    except Exception:  # noqa: BLE001 - whatever it needs
        return False
    return not differences(first, second, "")


def _resumes_by_torch(case: Case) -> bool:
    """Return whether a copy by `load_state_dict` of the optimizer itself goes on with equal bits."""
    program, again = _stepped(case), _stepped(case)
    fresh = _optimizer(case.optimizer, again.model, random.Random(case.seed), rate=0.01)
    try:
        fresh.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))
    except Exception:  # noqa: BLE001 - it does not load what it gives
        return False
    again.optimizer = fresh
    return not differences(program.run(200, STEPS), again.run(200, STEPS), "")


def act_on_cases(arguments: list[str]) -> None:
    """Save or load the cases of a plan on this rank, and write what became of each."""
    warnings.simplefilter("ignore")
    plan, act = Path(arguments[0]), {"save": _save, "load": _load}[arguments[1]]
    with process_group() if "RANK" in os.environ else nullcontext(0) as rank:
        for fields in json.loads(plan.read_text()):
            case = Case(*fields[:2], *map(tuple, fields[2:]))
            told = act(case, plan.parent / case.seed.replace("/", "-"))
            with plan.with_suffix(f".rank{rank}").open("a") as output:
                output.write(json.dumps(told) + "\n")


def _on_ranks(act: str, cases: Sequence[Case], folder: Path, *, ranks: int) -> list[list[dict[str, Any]]]:
    """Return what each rank says of each case; a rank that died says nothing from its case on."""
    plan = folder / f"{act}-{ranks}.json"
    plan.write_text(json.dumps([astuple(case) for case in cases]))
    ended = call_on_ranks(
        act_on_cases, [str(plan), act], folder=plan.with_suffix(""), ranks=ranks, timeout_s=60.0 + 3 * len(cases)
    )
    if not ended.ok:
        print(f"{plan}: statuses {ended.statuses}\n{ended.text[-3000:]}", flush=True)
    paths = [plan.with_suffix(f".rank{rank}") for rank in range(ranks)]
    told = [[json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in paths]
    return [[rows[number] for rows in told if number < len(rows)] for number in range(len(cases))]


def try_cases(cases: Sequence[Case], folder: Path) -> tuple[list[str], Counter[str]]:
    """Save all cases and load them again; return the problems, and how often each outcome was seen."""
    problems, outcomes = [], Counter[str]()
    for place, act in enumerate(("save", "load")):
        left = []
        for ranks in sorted({case.ranks[place] for case in cases}):
            chosen = [case for case in cases if case.ranks[place] == ranks]
            for case, rows in zip(chosen, _on_ranks(act, chosen, folder, ranks=ranks), strict=True):
                outcome = rows[0]["outcome"] if len({row["outcome"] for row in rows}) == 1 else "wrong"
                if outcome == "wrong" or len(rows) < ranks:
                    problems.append(f"{case}, {case.way}, {act}: {rows}")
                elif outcome == "done" and act == "save":
                    left.append(case)
                else:
                    outcomes[{"done": "equal"}.get(outcome, f"{outcome} by {act}")] += 1
        cases = left
    return problems, outcomes


class Color(enum.Enum):
    """An enum of a program."""

    RED = 1


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
