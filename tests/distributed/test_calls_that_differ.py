"""Ranks of a program of one's own that raise in a call, skip it, or make another: every rank ends, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from reprise.nested.filling import Filling
from reprise.nested.held import HeldTensors
from reprise.saving.plan import Plan
from reprise.storage import FolderLock, shared_folder
from reprise.storage.worker import Worker
from tests.distributed.programs import Outcome, refused, run_programs


def fails(call: Callable[[], object]) -> None:
    """Print the class and the text of what a call raises."""
    refused(call, Exception)


def linear(kind: type[nn.Module] = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return kind(3) if kind is nn.LazyLinear else kind(3, 3)


def raise_on_rank_1(folder: Path, rank: int) -> None:
    """Give on rank 1 what makes torch raise, in every call; then save and load."""
    lazy = linear(nn.LazyLinear if rank else nn.Linear)
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) if rank else torch.ones(2)
    meta = nn.Linear(3, 3, device="meta" if rank else "cpu")
    good = linear()
    fails(lambda: save(folder, lazy, iteration=1))
    fails(lambda: save_state_dict(folder, {"a": ragged}, iteration=1))
    fails(lambda: save(folder, meta, iteration=1))
    save(folder, good, iteration=2)
    fails(lambda: load(folder, lazy))
    fails(lambda: load(folder, meta))
    with AsyncSaver(folder) as saver:
        fails(lambda: saver.save(3, lazy))
        saver.save(4, good)
    original = Filling.live
    if rank:
        Filling.live = lambda *_: [].pop()  # type: ignore[method-assign]
    fails(lambda: load(folder, good))
    Filling.live = original  # type: ignore[method-assign]
    load(folder, good)


def raise_after_the_agreement(folder: Path, *, is_failing: bool) -> None:
    """Raise on one rank within a save that all ranks have agreed on; then save again."""
    model = linear()
    with AsyncSaver(folder / "saver") as saver:
        places = [(Plan, "__init__"), (Plan, "begin"), (Worker, "submit")]
        for number, (owner, name) in enumerate(places):
            original = getattr(owner, name)
            if is_failing:
                setattr(owner, name, lambda *_, **__: [].pop())
            fails(lambda: save(folder, model, iteration=number))  # noqa: B023
            if is_failing:
                fails(lambda: saver.save(number, model))  # noqa: B023
            else:
                saver.save(number, model)
                fails(saver.wait)
            setattr(owner, name, original)
        saver.save(8, model)
        save(folder, model, iteration=8)
        saver.wait()
        original = HeldTensors.with_replicas
        if is_failing:
            HeldTensors.with_replicas = lambda *_, **__: [].pop()  # type: ignore[method-assign]
            fails(lambda: saver.save(9, linear()))
        else:
            saver.save(9, linear())
            fails(saver.wait)
        HeldTensors.with_replicas = original  # type: ignore[method-assign]
        fails(lambda: saver.save(10, linear()))


def raise_on_0_after_the_agreement(folder: Path, rank: int) -> None:
    raise_after_the_agreement(folder, is_failing=rank == 0)


def raise_on_1_after_the_agreement(folder: Path, rank: int) -> None:
    raise_after_the_agreement(folder, is_failing=rank == 1)


def make_other_calls(folder: Path, rank: int) -> None:
    """Let the ranks make other calls, and one rank skip some; then make the same again."""
    model = linear()
    save(folder, model, iteration=1)
    state = {"a": torch.ones(2)}
    fails(lambda: save(folder, model, iteration=2) if rank else load(folder, model))
    fails(lambda: save_state_dict(folder, state, iteration=2 + rank))
    load(folder, model)
    for calls in range(2):
        if rank == calls:
            dist.barrier()
        fails(lambda: save(folder, model, iteration=9, timeout_s=0.1))
        if rank != calls:
            dist.barrier()
    fails(lambda: save(folder, model, iteration=9, timeout_s=float("nan")))
    with AsyncSaver(folder) as saver:  # which a busy machine's ranks do not all call within 0.1 s
        saver._timeout_s = 0.1
        if rank:
            fails(lambda: saver.save(3, model))
        dist.barrier()
        if not rank:
            fails(lambda: saver.save(3, model))
    save(folder, model, iteration=5)
    load_state_dict(folder, {"model": model.state_dict()})


def save_elsewhere(folder: Path, rank: int) -> None:
    """Give on rank 1 a folder of its own, which is missing or is there; then a folder that another job holds."""
    shared_folder.SEEN_WITHIN_S = 0.05
    folder.mkdir(exist_ok=True)
    for name in ("missing", "there"):
        own = folder / f"{name}{rank}"
        if rank and name == "there":
            own.mkdir()
        fails(lambda own=own: save(own, linear(), iteration=1))  # type: ignore[misc]
    held = folder / "held"
    lock = FolderLock(held, "other")
    if not rank:
        lock.acquire()
    fails(lambda: save(held, linear(), iteration=1))
    lock.release()
    save(held, linear(), iteration=1)


def count_connections(folder: Path, rank: int) -> None:
    """Count the connections to the store that calls open, before and after one that fails."""
    opened: list[int] = []
    clone = dist.PrefixStore.clone
    dist.PrefixStore.clone = lambda store: opened.append(0) or clone(store)
    for iteration in range(3):
        save(folder, linear(), iteration=iteration)
        load(folder, linear())
    print(f"[{len(opened)}]", flush=True)
    fails(lambda: save(folder, linear(nn.LazyLinear if rank else nn.Linear), iteration=4))
    save(folder, linear(), iteration=4)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what became of each program; connections are counted in processes that have none."""
    folder = tmp_path_factory.mktemp("calls")
    others = [raise_on_rank_1, raise_on_0_after_the_agreement, raise_on_1_after_the_agreement, make_other_calls]
    return run_programs([count_connections, *others, save_elsewhere], folder)


def test_what_torch_raises_on_one_rank_ends_every_rank(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["raise_on_rank_1"]
    first, second = outcome.refusals()
    for raised, shared in zip(second, first, strict=True):
        kind, _, text = raised.partition("] ")
        assert shared.startswith("[CheckpointError] Rank 1"), shared
        assert text.split(". ")[0].rstrip(".") in shared, (shared, raised)
        assert kind == "[CheckpointError" or f"{kind[1:]}: " in shared, (shared, raised)
    assert "(/model/weight)" in first[0]
    assert any("Rank 1 failed: IndexError: pop from empty list" in line for line in first)
    assert outcome.committed == ["iter_0000002", "iter_0000004"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_after_the_agreement_ends_every_rank(outcomes: dict[str, Outcome], failing: int) -> None:
    outcome = outcomes[f"raise_on_{failing}_after_the_agreement"]
    for rank, lines in enumerate(outcome.refusals()):
        assert len(lines) == 8
        for line in lines[:7]:
            if rank == failing:
                assert line.startswith("[IndexError] pop from empty list")
            else:
                assert "IndexError: pop from empty list" in line
                assert failing == 0 or "Rank 1" in line
        # Another rank may still be told of the failure that closed the saver.
        assert "closed" in lines[7] or (rank != failing and f"Rank {failing} failed: IndexError" in lines[7])
    assert sorted(path.name for path in outcome.folder.rglob("iter_*")) == ["iter_0000008"] * 2


def test_other_calls_and_skipped_ones_are_named(outcomes: dict[str, Outcome]) -> None:
    expected = [
        "load() on rank 0; save(iteration=2) on rank 1.",
        "save_state_dict(iteration=2) on rank 0; save_state_dict(iteration=3) on rank 1.",
        "Rank 0 has not called save(iteration=9) within 0.1 s; rank 0 last called load().",
        "Rank 1 has not called save(iteration=9) within 0.1 s; rank 1 last called save(iteration=9).",
        "timeout_s",
        "Rank 0 has not called AsyncSaver.save(iteration=3) within 0.1 s; rank 0 last called AsyncSaver().",
    ]
    for lines in outcomes["make_other_calls"].refusals():
        assert all(text in line for line, text in zip(lines, expected, strict=True)), lines
    assert outcomes["make_other_calls"].committed == ["iter_0000001", "iter_0000005"]


def test_a_folder_of_one_rank_alone_is_refused(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["save_elsewhere"].folder
    for missing, there, held in outcomes["save_elsewhere"].refusals():
        assert "rank 0" in missing
        assert "rank 0" in there
        assert held.startswith("[LockError]")
    assert [path.name for path in folder.rglob("iter_*")] == ["iter_0000001"]
    assert not list(folder.rglob(".*"))
    assert not list((folder / "there1").iterdir())


def test_calls_share_their_connections(outcomes: dict[str, Outcome]) -> None:
    assert [lines[0] for lines in outcomes["count_connections"].refusals()] == ["[1]", "[1]"]
    assert len(outcomes["count_connections"].committed) == 4


def test_no_rank_waits_alone_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lazy module"):
        save(tmp_path, nn.LazyLinear(3), iteration=1)
    with pytest.raises(CheckpointError, match="found meta"):
        save(tmp_path, nn.Linear(3, 3, device="meta"), iteration=1)
    assert not list(tmp_path.iterdir())
