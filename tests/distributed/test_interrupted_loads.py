"""An interrupt on one of two ranks leaves each of them with all of the old state or all of the new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reprise import CheckpointError, PartialLoadError, load_state_dict, save_state_dict
from reprise.loading import Restorer
from tests.crash.interrupts import interrupt
from tests.distributed.programs import process_group
from tests.harness import call_on_ranks

FEW = 40
State = dict[str, Any]


class Position:
    """An object with a state of its own."""

    def __init__(self, value: float) -> None:
        self.state: State = {"at": value}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def made(value: float) -> State:
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.full((3, 2), value), mesh, [Shard(0)])
    return {"cut": cut, "plain": torch.full((3,), value), "object": Position(value), "epoch": value}


def values_of(state: State) -> set[float]:
    """Return the different values in a state."""
    tensors = state["cut"].to_local().flatten().tolist() + state["plain"].tolist()
    return {*tensors, state["object"].state["at"], state["epoch"]}


def load_with_interrupts(arguments: list[str]) -> None:
    """Load `count` times, or twice for each line, with an interrupt of rank 0 or 1 at a later line each time."""
    folder, count = Path(arguments[0]), int(arguments[1])
    restore: Callable[..., Any] = Restorer.restore
    seen, lines, at = Counter[str](), 0, None

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal lines
        outcome = interrupt(lambda: restore(*given, **named), at=at)
        lines = outcome.lines if at is None else lines
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    with process_group() as rank:
        save_state_dict(folder, made(2.0), iteration=1)
        for _ in range(2):  # the second without first imports
            Restorer.restore = interrupted  # type: ignore[method-assign]
            load_state_dict(folder, made(1.0))
        most = torch.tensor(lines)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        count = count or 2 * int(most)
        for number in range(count):
            state, at = made(1.0), 1 + lines * number // count
            Restorer.restore = interrupted if rank == number % 2 else restore  # type: ignore[method-assign]
            error: BaseException | None = None
            try:
                load_state_dict(folder, state)
            except BaseException as caught:  # noqa: BLE001 - what the caller sees
                error = caught
            Restorer.restore = restore  # type: ignore[method-assign]
            found, kind = values_of(state), type(error)
            assert len(found) == 1, (rank, at, found, error)
            if kind in (PartialLoadError, type(None)):
                assert found == {2.0}, (rank, at, error)
            elif issubclass(kind, CheckpointError):
                assert found == {1.0}, (rank, at, error)
            else:
                assert kind is KeyboardInterrupt
            seen[f"{kind.__name__} {found.pop()}"] += 1
            dist.barrier()
            load_state_dict(folder, state)
            assert values_of(state) == {2.0}
        print(lines, dict(seen), flush=True)


def test_an_interrupt_on_one_of_two_ranks(tmp_path: Path) -> None:
    ended = call_on_ranks(load_with_interrupts, [str(tmp_path / "saves"), str(FEW)], folder=tmp_path / "ranks", ranks=2)
    assert ended.ok, ended.text
    for outcome in ("KeyboardInterrupt 1.0", "CheckpointError 1.0"):
        assert outcome in ended.text


@pytest.mark.nightly
def test_an_interrupt_at_every_line_on_one_of_two_ranks(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "saves"), "0"]
    ended = call_on_ranks(load_with_interrupts, arguments, folder=tmp_path / "ranks", ranks=2, timeout_s=3600.0)
    assert ended.ok, ended.text
    for outcome in ("KeyboardInterrupt 1.0", "KeyboardInterrupt 2.0", "CheckpointError 1.0", "PartialLoadError 2.0"):
        assert outcome in ended.text
