"""Whatever ends a save at any line, its lock, its threads and its files are as before, and the next save works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import reprise
from reprise.errors import LockError
from reprise.storage.lock import is_locked
from tests.crash.interrupts import Outcome, count_lines, interrupt, lasting_threads
from tests.distributed.test_ranks_that_disagree import process_group
from tests.harness import call_on_ranks


@dataclass(slots=True)
class Program:
    """A model and the saves of a program."""

    model: nn.Module = field(default_factory=lambda: nn.Linear(4, 4))

    def save(self, folder: Path, iteration: int) -> None:
        reprise.save(folder, self.model, iteration=iteration)

    def save_in_background(self, folder: Path) -> None:
        with reprise.AsyncSaver(folder) as saver:
            saver.save(2, self.model)
            saver.wait()
            saver.save(3, self.model)


def troubles_of(call: Callable[[Path], None], folder: Path, *, at: int, error: type[BaseException]) -> list[str] | None:
    """Interrupt a call at a line and return what is wrong afterward; None where the call has fewer lines."""
    program, before = Program(), set(threading.enumerate())
    program.save(folder, 1)
    outcome = interrupt(lambda: call(folder), at=at, error=error)
    if outcome.place is None:
        return None
    troubles = []
    if not isinstance(outcome.error, error):
        troubles.append(f"the caller sees {outcome.error!r}")
    if outcome.place.startswith("async_saver.py") and outcome.place.endswith(("__enter__", "__exit__")):
        outcome.error = None  # beside the saver's block, the error's frames have the saver
    troubles += [name for name in lasting_threads(before) if name != "checkpoint-end"]
    if is_locked(folder):
        troubles.append("the lock is held")
    names = {path.name for path in folder.iterdir()} - {"lock", "latest_checkpointed_iteration.txt"}
    troubles += [f"{name} is left" for name in names - {f"iter_000000{number}" for number in (1, 2, 3)}]
    try:
        program.save(folder, 4)
    except BaseException as refusal:  # noqa: BLE001 - the test shows it
        troubles.append(f"the next save ends with {refusal}")
    troubles += [name for name in ("iter_0000001", "iter_0000004") if not (folder / name).is_dir()]
    for path in folder.glob("iter_*"):
        reprise.load(path, nn.Linear(4, 4))
    return [f"{outcome.place}: {trouble}" for trouble in troubles]


def save_inline(folder: Path) -> None:
    Program().save(folder, 2)


def save_in_background(folder: Path) -> None:
    Program().save_in_background(folder)


CALLS = {"inline": save_inline, "background": save_in_background}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("call", CALLS)
def test_a_save_ended_at_a_line_leaves_nothing(tmp_path: Path, call: str, error: type[BaseException]) -> None:
    lines = count_lines(lambda: CALLS[call](tmp_path / "counted"))
    first = {KeyboardInterrupt: 40, SystemExit: 130, ZeroDivisionError: 220}[error]
    for at in range(first, lines, 271):
        assert not troubles_of(CALLS[call], tmp_path / str(at), at=at, error=error)


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS)
def test_a_save_ended_at_any_line_leaves_nothing(tmp_path: Path, call: str) -> None:
    at, troubles = 1, list[str]()
    while (found := troubles_of(CALLS[call], tmp_path / str(at), at=at, error=KeyboardInterrupt)) is not None:
        troubles += found
        at += 1
    assert at > 1500
    assert troubles == []


def save_of(saver: reprise.AsyncSaver, iteration: int, **interruption: int) -> Outcome:
    model = nn.Linear(4, 4)
    return interrupt(lambda: saver.save(iteration, model), at=interruption.get("at"))


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_saver_goes_on_after_an_interrupt(tmp_path: Path, first: int) -> None:
    at, step = first, 97 if first == 1 else 3
    with reprise.AsyncSaver(tmp_path) as saver:
        while save_of(saver, at, at=at).place is not None:
            saver.save(at + 1, nn.Linear(4, 4))
            saver.wait()
            at += step
    assert not is_locked(tmp_path)
    assert at > 1000
    assert len(list(tmp_path.glob("iter_*"))) >= at // step


def test_a_dropped_saver_lets_go(tmp_path: Path) -> None:
    saver = reprise.AsyncSaver(tmp_path)
    saver.save_state_dict(1, {"a": torch.ones(3)})
    del saver  # the save is under way
    again = reprise.AsyncSaver(tmp_path)
    assert (tmp_path / "iter_0000001").is_dir()
    with pytest.raises(LockError, match="This process writes to this folder already") as caught:
        reprise.AsyncSaver(tmp_path)
    assert "AsyncSaver" in str(caught.value)
    assert "End that job" not in str(caught.value)
    again.save_state_dict(2, {"a": torch.ones(3)})
    again.close()
    assert not is_locked(tmp_path)


def save_on_two_ranks(arguments: list[str]) -> None:
    """Interrupt a save on one of two ranks at each of some lines, and print what goes wrong on this rank."""
    folder, call, first, step = Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3])
    with process_group() as rank:
        dist.barrier()
        at, over, model, tried = first, set[int](), nn.Linear(4, 4), 0
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)

        def save(path: Path) -> None:
            if call == "inline":
                reprise.save(path, model, iteration=2, timeout_s=_RANKS_S)
                return
            with reprise.AsyncSaver(path, timeout_s=_RANKS_S) as saver:
                saver.save(2, model)
                saver.wait()
                saver.save(3, model)

        while len(over) < 2:
            for who in {0, 1} - over:
                path = folder / f"{at}-{who}"
                start = time.monotonic()
                outcome = interrupt(partial(save, path), at=at if rank == who else None)
                took_s = time.monotonic() - start
                print(f"{at} on rank {who}: {outcome.place} {outcome.error!r}", flush=True)
                if outcome.error is not None and rank == who and not isinstance(outcome.error, KeyboardInterrupt):
                    print(f"TROUBLE {outcome.place}: the caller sees {outcome.error!r}", flush=True)
                if took_s > 15 * _RANKS_S:
                    print(f"TROUBLE at {at} on rank {who}: rank {rank} took {took_s:.0f} s", flush=True)
                counts = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
                ended = torch.tensor([rank == who and outcome.place is None, _calls_of(rank)])
                dist.all_gather(counts, ended)
                over |= {who for count in counts if count[0]}
                tried += outcome.place is not None
                outcome.error = None
                if counts[0][1] != counts[1][1]:  # the interrupt came before the call had begun on its rank
                    print(f"SKIPPED {at}", flush=True)
                    _catch_up(rank, int(max(count[1] for count in counts)))
                try:
                    reprise.save(path, model, iteration=4, timeout_s=_RANKS_S)
                except BaseException as refusal:  # noqa: BLE001 - the test shows it
                    print(f"TROUBLE at {at} on rank {who}: the next save: {refusal}", flush=True)
                dist.barrier()
                if rank == 0 and (is_locked(path) or not (path / "iter_0000004").is_dir()):
                    print(f"TROUBLE at {at} on rank {who}: {sorted(p.name for p in path.iterdir())}", flush=True)
            at += step
        print(f"TRIED {tried}", flush=True)


_RANKS_S = 2.0


def _calls_of(rank: int) -> int:
    """Return the number of calls that a rank has made."""
    return int(distributed_c10d._get_default_store().add(f"reprise/calls/{rank}", 0))


def _catch_up(rank: int, calls: int) -> None:
    """Count a call that a rank has not made: without it, it would be one call behind the other ever after."""
    distributed_c10d._get_default_store().add(f"reprise/calls/{rank}", calls - _calls_of(rank))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("first", "step"),
    [
        pytest.param(60, 701, id="some"),
        *[pytest.param(first, 8, marks=pytest.mark.nightly, id=f"each line, {first} of 8") for first in range(1, 9)],
    ],
)
@pytest.mark.slow
def test_an_interrupt_on_one_rank_frees_the_other(tmp_path: Path, call: str, first: int, step: int) -> None:
    ended = call_on_ranks(
        save_on_two_ranks,
        [str(tmp_path / "saves"), call, str(first), str(step)],
        folder=tmp_path / "out",
        ranks=2,
        timeout_s=7200.0 if step == 8 else 300.0,
    )
    assert ended.ok, ended.text
    assert "TRIED" in ended.text
    assert "TROUBLE" not in ended.text
