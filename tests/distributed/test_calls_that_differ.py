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
from reprise.folder import FolderLock
from reprise.nested.filling import Filling
from reprise.nested.held import LastTensors
from reprise.saving.snapshot import Staging
from reprise.storage import shared_folder
from reprise.storage.worker import Worker
from tests.distributed.test_ranks_that_disagree import process_group
from tests.harness import call_on_ranks


def run(function: Callable[[list[str]], None], folder: Path) -> tuple[str, ...]:
    """Call a function of this module on two ranks and return what each has printed."""
    ended = call_on_ranks(function, [str(folder)], folder=folder / "ranks", ranks=2, timeout_s=60.0)
    assert ended.ok, ended.text
    return ended.outputs


def fails(call: Callable[[], object]) -> None:
    """Print the class and the text of what a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    print(f"[{type(caught.value).__name__}] {str(caught.value).splitlines()[0]}", flush=True)


def linear(kind: type[nn.Module] = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return kind(3) if kind is nn.LazyLinear else kind(3, 3)


def raise_on_rank_1(arguments: list[str]) -> None:
    """Give on rank 1 what makes torch raise, in every call; then save and load."""
    folder = arguments[0]
    with process_group() as rank:
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


def test_what_torch_raises_on_one_rank_ends_every_rank(tmp_path: Path) -> None:
    first, second = (output.splitlines() for output in run(raise_on_rank_1, tmp_path))
    first, second = ([line for line in lines if line.startswith("[")] for lines in (first, second))
    for raised, shared in zip(second, first, strict=True):
        kind, _, text = raised.partition("] ")
        assert shared.startswith("[CheckpointError] Rank 1"), shared
        assert text.rstrip(".") in shared, (shared, raised)
        assert kind == "[CheckpointError" or f"{kind[1:]}: " in shared, (shared, raised)
    assert "A tensor of a lazy module has no shape yet (/model/weight)" in first[0]
    assert "[CheckpointError] Rank 1 failed: IndexError: pop from empty list." in first
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]


def raise_after_the_agreement(arguments: list[str]) -> None:
    """Let rank 1, and then rank 0, raise within a save that all ranks have agreed on; then save again."""
    folder, failing = arguments[0], int(arguments[1])
    model = linear()
    with process_group() as rank, AsyncSaver(Path(folder, "saver")) as saver:
        places = [(Staging, "plan"), (Staging, "begin"), (Worker, "submit")]
        for number, (owner, name) in enumerate(places):
            original = getattr(owner, name)
            if rank == failing:
                setattr(owner, name, lambda *_, **__: [].pop())
            fails(lambda: save(folder, model, iteration=number))  # noqa: B023
            if rank == failing:
                fails(lambda: saver.save(number, model))  # noqa: B023
            else:
                saver.save(number, model)
                fails(saver.wait)
            setattr(owner, name, original)
        saver.save(8, model)
        save(folder, model, iteration=8)
        saver.wait()
        original = LastTensors.shared
        if rank == failing:
            LastTensors.shared = lambda *_: [].pop()  # type: ignore[method-assign]
            fails(lambda: saver.save(9, linear()))
        else:
            saver.save(9, linear())
            fails(saver.wait)
        LastTensors.shared = original  # type: ignore[method-assign]
        fails(lambda: saver.save(10, linear()))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_after_the_agreement_ends_every_rank(tmp_path: Path, failing: int) -> None:
    arguments = [str(tmp_path), str(failing)]
    ended = call_on_ranks(raise_after_the_agreement, arguments, folder=tmp_path / "ranks", ranks=2, timeout_s=60.0)
    assert ended.ok, ended.text
    for rank, output in enumerate(ended.outputs):
        lines = [line for line in output.splitlines() if line.startswith("[")]
        assert len(lines) == 8
        for line in lines[:7]:
            if rank == failing:
                assert line.startswith("[IndexError] pop from empty list")
            else:
                assert "IndexError: pop from empty list" in line
                assert failing == 0 or "Rank 1" in line
        assert "A saver that is closed saves nothing" in lines[7]
    assert sorted(path.name for path in tmp_path.rglob("iter_*")) == ["iter_0000008"] * 2


def make_other_calls(arguments: list[str]) -> None:
    """Let the ranks make other calls, and one rank skip some; then make the same again."""
    folder = arguments[0]
    with process_group() as rank:
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
        with AsyncSaver(folder, timeout_s=0.1) as saver:
            if rank:
                fails(lambda: saver.save(3, model))
            dist.barrier()
            if not rank:
                fails(lambda: saver.save(3, model))
        save(folder, model, iteration=5)
        load_state_dict(folder, {"model": model.state_dict()})


def test_other_calls_and_skipped_ones_are_named(tmp_path: Path) -> None:
    for output in run(make_other_calls, tmp_path):
        lines = [line for line in output.splitlines() if line.startswith("[")]
        expected = [
            "found load() on rank 0; save(iteration=2) on rank 1.",
            "found save_state_dict(iteration=2) on rank 0; save_state_dict(iteration=3) on rank 1.",
            "Rank 0 has not called save(iteration=9) within 0.1 s; rank 0 last called load().",
            "Rank 1 has not called save(iteration=9) within 0.1 s; rank 1 last called save(iteration=9).",
            "timeout_s is invalid, expected a finite number of seconds, 0 or more, found nan.",
            "Rank 0 has not called AsyncSaver.save(iteration=3) within 0.1 s; rank 0 last called AsyncSaver().",
        ]
        for line, text in zip(lines, expected, strict=True):
            assert text in line
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000005"]


def save_elsewhere(arguments: list[str]) -> None:
    """Give on rank 1 a folder of its own, which is missing or is there; then a folder that another job holds."""
    shared_folder.SEEN_WITHIN_S = 0.05
    with process_group() as rank:
        for name in ("missing", "there"):
            folder = Path(arguments[0], f"{name}{rank}")
            if rank and name == "there":
                folder.mkdir()
            fails(lambda folder=folder: save(folder, linear(), iteration=1))  # type: ignore[misc]
        held = Path(arguments[0], "held")
        lock = FolderLock(held, "other")
        if not rank:
            lock.acquire()
        fails(lambda: save(held, linear(), iteration=1))
        lock.release()
        save(held, linear(), iteration=1)


def test_a_folder_of_one_rank_alone_is_refused(tmp_path: Path) -> None:
    for output in run(save_elsewhere, tmp_path):
        missing, there, held = (line for line in output.splitlines() if line.startswith("["))
        for line in (missing, there):
            assert "This host does not see the checkpoint folder of rank 0" in line
        assert held.startswith("[LockError]")
    assert [path.name for path in tmp_path.rglob("iter_*")] == ["iter_0000001"]
    assert not list(tmp_path.rglob(".*"))
    assert not list((tmp_path / "there1").iterdir())


def count_connections(arguments: list[str]) -> None:
    """Count the connections to the store that calls open, before and after one that fails."""
    opened: list[int] = []
    clone = dist.PrefixStore.clone
    dist.PrefixStore.clone = lambda store: opened.append(0) or clone(store)
    with process_group() as rank:
        for iteration in range(3):
            save(arguments[0], linear(), iteration=iteration)
            load(arguments[0], linear())
        print(f"[{len(opened)}]", flush=True)
        fails(lambda: save(arguments[0], linear(nn.LazyLinear if rank else nn.Linear), iteration=4))
        save(arguments[0], linear(), iteration=4)


def test_calls_share_their_connections(tmp_path: Path) -> None:
    for output in run(count_connections, tmp_path):
        assert next(line for line in output.splitlines() if line.startswith("[")) == "[2]"
    assert len(list(tmp_path.glob("iter_*"))) == 4


def test_no_rank_waits_alone_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lazy module"):
        save(tmp_path, nn.LazyLinear(3), iteration=1)
    with pytest.raises(CheckpointError, match="has no memory"):
        save(tmp_path, nn.Linear(3, 3, device="meta"), iteration=1)
    assert not list(tmp_path.iterdir())
