"""Random modules and optimizers, saved and loaded into fresh ones: the next three steps have equal bits.

Or the refusal names the key. With several ranks, saves and loads run on one or two, and some modules are sharded.
Optimizers are those of `torch.optim`, of the packages `pytorch_optimizer` and `torch_optimizer` where they are
installed, and made-up ones. A case is a function of its number and the seed.
"""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from tests.distributed.odd_modules import MODULES, REFUSED, SIZE, Nested, Sparse
from tests.distributed.random_states import answer, each_case, on_ranks, whole
from tests.states import differences

WAYS = ("save", "save_state_dict", "AsyncSaver.save", "AsyncSaver.save_state_dict", "state")
PACKAGES = ("torch.optim", "pytorch_optimizer", "torch_optimizer")
STEPS = 3  # after the load
# What their constructors need.
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.Adam": {"amsgrad": True},
    "torch.optim.LBFGS": {"max_iter": 2, "history_size": 3},
    "pytorch_optimizer.LBFGS": {"max_iter": 2, "history_size": 3},
    "pytorch_optimizer.Ranger21": {"num_iterations": 20},
}
_OF_ONE = ("torch.optim.SGD", "torch.optim.AdamW", "torch.optim.Adagrad", "torch.optim.RMSprop", "")  # on shards too


@dataclass(frozen=True, slots=True)
class Case:
    """A module, an optimizer, and the ranks that save and load them; an optimizer without a name is made up."""

    seed: str
    optimizer: str
    ranks: tuple[int, int] = (1, 1)
    is_sharded: bool = False

    @property
    def way(self) -> str:
        """Return the call that saves."""
        return random.Random(f"{self.seed}/way").choice(WAYS)


@cache
def optimizers() -> tuple[str, ...]:
    """Return the names of the optimizers that are installed."""
    found = []
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        kinds = [(name, kind) for name, kind in sorted(vars(module).items()) if isinstance(kind, type)]
        found += [
            f"{package}.{name}"
            for name, kind in kinds
            if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        ]
    return tuple(found)


def case_of(seed: int, number: int, *, ranks: int = 1) -> Case:
    """Return the case of a number: of three, two take an optimizer from the list, in turn, and one makes it up."""
    draw = random.Random(f"{seed}/{number}")
    names = optimizers()
    name = "" if number % 3 == 2 else names[(number - number // 3) % len(names)]
    if ranks == 1:
        return Case(f"{seed}/{number}", name)
    return Case(f"{seed}/{number}", draw.choice(_OF_ONE), (draw.randint(1, 2), draw.randint(1, 2)), draw.random() < 0.6)


class Program:
    """The module and the optimizer of a case, on this rank.

    Args:
        fresh: whether they are other ones, before their first step.
    """

    def __init__(self, case: Case, *, fresh: bool) -> None:
        draw = random.Random(case.seed)
        kinds = [draw.choice(MODULES) for _ in range(draw.randint(1, 3))]
        self.refusable = {REFUSED[kind] for kind in kinds if kind in REFUSED}
        own = random.Random(f"{case.seed}/{fresh}")
        torch.manual_seed(own.randrange(2**31))
        layers = [_shaped_as(kind, own, random.Random(case.seed)) for kind in kinds]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(SIZE, SIZE, bias=False))
        if case.optimizer == "torch.optim.SparseAdam":
            self.model = Sparse()
        if draw.random() < 0.2:
            self.model = nn.Sequential(self.model, self.model)
        has_unstorable = draw.random() < 0.1
        self.steps = draw.randint(0, 3)
        if case.is_sharded and dist.is_initialized() and dist.get_world_size() > 1:
            fully_shard(self.model)
        if case.optimizer:
            self.optimizer = _optimizer(case.optimizer, self.model)
            self.refusable |= {"(/optimizer", "(/its", "found key "}
        else:
            self.optimizer = Nested(self.model.parameters(), case.seed, has_unstorable=has_unstorable)
            self.refusable |= {"unstorable"} if has_unstorable else set()

    def run(self, first: int, steps: int) -> list[Any]:
        """Run so many steps, and return their losses and the state after them."""
        torch.manual_seed(first)
        np.random.seed(first)
        random.seed(first)
        losses = []
        for number in range(first, first + steps):
            inputs = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(number))

            @torch.enable_grad()
            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = (self.model(inputs) - inputs.roll(1)).square().mean()
                loss.backward(create_graph=_needs_graph(self.optimizer))
                return loss

            loss = self.optimizer.step(closure)
            losses.append(None if loss is None else float(loss))
        return [losses, whole(dict(self.model.named_parameters())), whole(_output(self.model))]


def _shaped_as(kind: Callable[[random.Random], nn.Module], own: random.Random, shape: random.Random) -> nn.Module:
    """Return a module with numbers of its own, and choices of form from the case."""
    module = kind(own)
    if hasattr(module, "form") or hasattr(module, "split") or hasattr(module, "held"):
        model = kind(shape)
        for name in ("form", "split", "held"):
            if hasattr(module, name):
                setattr(module, name, getattr(model, name))
    return module


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer by the first way in which its class takes parameters.

    Raises:
        TypeError: if it takes them in none of these ways.
    """
    package, _, member = name.rpartition(".")
    kind, options = getattr(importlib.import_module(package), member), OPTIONS.get(name, {})
    parameters = list(model.parameters())
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


def _needs_graph(optimizer: torch.optim.Optimizer) -> bool:
    return any(name in type(optimizer).__name__.lower() for name in ("hessian", "sophia"))


def _output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.ones(2, SIZE))
    return found


def save_case(case: Case, folder: Path, _: int) -> dict[str, Any]:
    """Save a case, and note what its next steps are. A call of all ranks."""
    if case.optimizer and not _works(case):
        return {"outcome": "no use", "text": f"{case.optimizer} cannot be stepped so"}
    program = Program(case, fresh=False)
    program.run(100, program.steps)

    def call() -> None:
        match case.way:
            case "save":
                save(folder, program.model, program.optimizer, iteration=1)
            case "state":
                state = {"part": program.model, "its": program.optimizer}
                save(folder, nn.Linear(1, 1), iteration=1, state=state)
            case "save_state_dict":
                save_state_dict(folder, _given(program), iteration=1)
            case "AsyncSaver.save":
                with AsyncSaver(folder) as saver:
                    saver.save(1, program.model, program.optimizer)
            case _:
                with AsyncSaver(folder) as saver:
                    saver.save_state_dict(1, _given(program))

    told = answer(call, program.refusable)
    expected = program.run(200, STEPS)
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(expected, folder / "expected.pt")
    return told


def load_case(case: Case, folder: Path, _: int) -> dict[str, Any]:
    """Load a case into a fresh program, and compare its next steps. A call of all ranks."""
    program = Program(case, fresh=True)
    expected = torch.load(folder / "expected.pt", weights_only=False)

    def call() -> None:
        if case.way == "state":
            load(folder, nn.Linear(1, 1), state={"part": program.model, "its": program.optimizer})
        elif "state_dict" in case.way:
            load_state_dict(folder, _given(program))
        else:
            load(folder, program.model, program.optimizer)

    program.refusable &= {"informs"}  # what was saved can be loaded
    told = answer(call, program.refusable)
    if told["outcome"] != "done":
        return told
    found = differences(expected, program.run(200, STEPS), "")
    if found and (not case.optimizer or dist.is_initialized() or _resumes_by_torch(case)):
        return {"outcome": "wrong", "text": "; ".join(found[:2])}
    return {"outcome": "not by torch either", "text": case.optimizer} if found else told


def _given(program: Program) -> dict[str, Any]:
    return {"model": program.model, "optimizer": program.optimizer}


def _works(case: Case) -> bool:
    """Return whether an optimizer can be stepped, and does the same twice."""
    try:
        Program(case, fresh=False).optimizer.state_dict()
        first, second = (Program(case, fresh=False).run(100, 4) for _ in range(2))
    except Exception:  # noqa: BLE001 - whatever it needs
        return False
    return not differences(first, second, "")


def _resumes_by_torch(case: Case) -> bool:
    """Return whether a copy by `load_state_dict` of the optimizer itself goes on with equal bits."""
    program, again = Program(case, fresh=False), Program(case, fresh=False)
    for part in (program, again):
        part.run(100, part.steps)
    fresh = _optimizer(case.optimizer, again.model)
    try:
        fresh.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))
    except Exception:  # noqa: BLE001 - it does not load what it gives
        return False
    again.optimizer = fresh
    return not differences(program.run(200, STEPS), again.run(200, STEPS), "")


def save_cases(arguments: list[str]) -> None:
    """Save the cases of a plan on this rank."""
    warnings.simplefilter("ignore")
    each_case(arguments, Case, save_case)


def load_cases(arguments: list[str]) -> None:
    """Load the cases of a plan on this rank."""
    warnings.simplefilter("ignore")
    each_case(arguments, Case, load_case)


def try_cases(cases: Sequence[Case], folder: Path) -> tuple[list[str], Counter[str]]:
    """Save all cases and load them again; return the problems, and how often each outcome was seen."""
    problems, outcomes = [], Counter[str]()
    for place, act in enumerate((save_cases, load_cases)):
        left = []
        for ranks in (1, 2):
            chosen = [case for case in cases if case.ranks[place] == ranks]
            for case, rows in zip(chosen, on_ranks(act, chosen, folder, ranks=ranks), strict=True):
                outcome = rows[0]["outcome"] if rows and len({row["outcome"] for row in rows}) == 1 else "wrong"
                if outcome == "wrong":
                    problems.append(f"{case}, {case.way}, {act.__name__}: {rows}")
                elif outcome == "done" and act is save_cases:
                    left.append(case)
                    continue
                outcomes[{"done": "equal"}.get(outcome, outcome)] += 1
        cases = left
    return problems, outcomes
