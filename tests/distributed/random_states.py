"""Random states of random programs: a load returns what was there at the save, or a refusal names the key.

A case runs on one to four ranks, by one of the calls, and is a function of its number and the seed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from tests.distributed.programs import process_group
from tests.distributed.random_programs import Program, fill, mesh_of, program, tensors_of
from tests.harness import call_on_ranks
from tests.states import differences

WAYS = ("save", "save_state_dict", "AsyncSaver.save", "AsyncSaver.save_state_dict")
LIMIT_S = 60.0  # of one call on a busy machine; a hang takes longer


@dataclass(frozen=True, slots=True)
class Case:
    """A state, the calls that save and load it, and where these run."""

    seed: str
    way: str
    ranks: tuple[int, int]
    meshes: tuple[str, str]

    def __str__(self) -> str:
        return f"case {self.seed}: {self.way}, {self.ranks[0]} {self.meshes[0]} -> {self.ranks[1]} {self.meshes[1]}"


def case_of(seed: int, number: int, *, ranks: int) -> Case:
    """Return the case of a number, on up to so many ranks."""
    draw = random.Random(f"{seed}/{number}")
    meshes = draw.choice(["plain", "line", "grid"]), draw.choice(["plain", "line", "grid"])
    sizes = draw.randint(1, ranks), draw.randint(1, ranks)
    return Case(f"{seed}/{number}", draw.choice(WAYS), sizes, meshes)


def try_cases(cases: Sequence[Case], folder: Path) -> tuple[list[str], Counter[str]]:
    """Save all cases and load them again; return the problems, and how often each outcome was seen."""
    problems, outcomes = [], Counter[str]()
    saved: list[Case] = []
    for ranks in range(1, 5):
        chosen = [case for case in cases if case.ranks[0] == ranks]
        for case, told in zip(chosen, on_ranks(save_cases, chosen, folder, ranks=ranks), strict=True):
            outcome = _verdict(case, told, problems)
            outcomes[f"{outcome} by {case.way}" if outcome == "refused" else outcome] += 1
            saved += [case] if outcome == "done" else []
    for ranks in range(1, 5):
        chosen = [case for case in saved if case.ranks[1] == ranks]
        for case, told in zip(chosen, on_ranks(load_cases, chosen, folder, ranks=ranks), strict=True):
            outcomes["equal" if _verdict(case, told, problems) == "done" else "refused by a load"] += 1
    return problems, outcomes


def on_ranks(
    function: Callable[[list[str]], None], cases: Sequence[Any], folder: Path, *, ranks: int
) -> list[list[dict[str, Any]]]:
    """Return what each rank says of each case; a rank that died says nothing from its case on."""
    if not cases:
        return []
    name = f"{function.__name__}-{ranks}"
    plan = folder / f"{name}.json"
    plan.write_text(json.dumps([astuple(case) for case in cases]))
    limit_s = LIMIT_S + 2 * len(cases)
    ended = call_on_ranks(function, [str(plan)], folder=folder / name, ranks=ranks, timeout_s=limit_s)
    told = [[json.loads(line) for line in _lines(folder / f"{name}.rank{rank}")] for rank in range(ranks)]
    if not ended.ok:
        print(f"{name}: statuses {ended.statuses}\n{ended.text[-3000:]}", flush=True)
    return [[rows[number] for rows in told if number < len(rows)] for number in range(len(cases))]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _verdict(case: Case, told: list[dict[str, Any]], problems: list[str]) -> str:
    """Return `done`, `refused` or `wrong`, and add what is wrong to the problems."""
    outcomes = {row["outcome"] for row in told}
    problem = next((row["text"] for row in told if row["outcome"] == "wrong"), None)
    if len(told) < case.ranks[0] and len(told) < case.ranks[1]:
        problem = f"{len(told)} ranks answered"
    elif problem is None and len(outcomes) > 1:
        problem = f"ranks differ: {[row['outcome'] for row in told]}: {told[0]['text']}"
    elif problem is None and max(row["seconds"] for row in told) > LIMIT_S:
        problem = f"took {max(row['seconds'] for row in told):.0f} s"
    if problem is not None:
        problems.append(f"{case}: {problem}")
        return "wrong"
    return str(outcomes.pop())


def save_cases(arguments: list[str]) -> None:
    """Save the cases of a plan on this rank, and write what became of each."""
    each_case(arguments, Case, _save)


def load_cases(arguments: list[str]) -> None:
    """Load the cases of a plan on this rank, and write what became of each."""
    each_case(arguments, Case, _load)


def each_case(arguments: list[str], kind: type[Any], act: Callable[[Any, Path, int], dict[str, Any]]) -> None:
    """Act on the cases of a plan on this rank, and write what became of each."""
    plan = Path(arguments[0])
    with process_group() if "RANK" in os.environ else nullcontext(0) as rank:
        for fields in json.loads(plan.read_text()):
            case, start = kind(*fields), time.monotonic()
            told = act(case, plan.parent / case.seed.replace("/", "-"), rank)
            with plan.with_suffix(f".rank{rank}").open("a") as output:
                output.write(json.dumps({**told, "seconds": time.monotonic() - start}) + "\n")


def _save(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    made = program(case.seed, mesh_of(case.meshes[0], case.ranks[0]))
    reference = whole(_given(made, case.way))
    if rank == 0:
        folder.mkdir(exist_ok=True)
        torch.save(reference, folder / "reference.pt")

    def call() -> None:
        if case.way == "save":
            save(folder, made.model, made.optimizer, iteration=1, state=_state(made))
        elif case.way == "save_state_dict":
            save_state_dict(folder, _given(made, case.way), iteration=1, model=made.model)
        else:
            _save_behind(case, made, folder)

    return answer(call, made.refusable)


def _save_behind(case: Case, made: Program, folder: Path) -> None:
    """Save in the background, and change every tensor and value after the call."""
    with AsyncSaver(folder) as saver:
        if case.way == "AsyncSaver.save":
            state = _state(made)
            saver.save(1, made.model, made.optimizer, state=state)
        else:
            given = _given(made, case.way)
            saver.save_state_dict(1, given, model=made.model)
            state = given["values"]
        _change(made, state)


def _change(made: Program, values: dict[str, Any]) -> None:
    for tensor in tensors_of([made.model.state_dict(), made.optimizer.state_dict(), made.tensors]):
        fill(tensor, 1)
    for group in made.optimizer.param_groups:
        group["lr"] = 77.0
    for value in values.values():
        if isinstance(value, list):
            value.append("later")
        elif isinstance(value, dict):
            value["later"] = 1


def _load(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    made = program(case.seed, mesh_of(case.meshes[1], case.ranks[1]), spoiled=True)
    reference = torch.load(folder / "reference.pt", weights_only=False)
    difference: list[str] = []

    def call() -> None:
        if case.way in ("save", "AsyncSaver.save"):
            values = dict(load(folder, made.model, made.optimizer))
            values.pop("iteration")
            loaded = {**made.contents(), "values": values}
            loaded.pop("tensors")
        else:
            loaded = _given(made, case.way)
            load_state_dict(folder, loaded, model=made.model)
        difference.extend(differences(reference, whole(loaded), "state"))

    told = answer(call, made.refusable)
    if difference:
        return {"outcome": "wrong", "text": "; ".join(difference[:3])}
    return told


def _given(made: Program, way: str) -> dict[str, Any]:
    """Return what a call is given, as one dict."""
    contents = made.contents()
    if way in ("save", "AsyncSaver.save"):
        contents.pop("tensors")
        contents["values"] = _state(made)
    return contents


def _state(made: Program) -> dict[str, Any]:
    values: dict[str, Any] = made.contents()["values"]
    return values


def answer(call: Callable[[], None], refusable: Collection[str]) -> dict[str, Any]:
    """Return what became of a call: done, refused by one of these names, or wrong."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what it says is the outcome
        text = f"{type(error).__name__}: {error}"
        is_named = any(key in text for key in refusable)
        return {"outcome": "refused" if is_named else "wrong", "text": text}
    return {"outcome": "done", "text": ""}


def whole(tree: Any) -> Any:
    """Return a copy of nested state with whole tensors. A call of all ranks."""
    if isinstance(tree, DTensor):
        return tree.detach().full_tensor().clone()
    if isinstance(tree, torch.Tensor):
        return tree if tree.is_meta or tree.layout != torch.strided or tree.is_nested else _copied(tree)
    if isinstance(tree, dict):
        made = copy.copy(tree)
        made.update((key, whole(member)) for key, member in tree.items())
        return made
    if type(tree) in (list, tuple, set, frozenset):
        return type(tree)(whole(member) for member in tree)
    return tree if callable(tree) else copy.deepcopy(tree)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_neg().resolve_conj().clone()
