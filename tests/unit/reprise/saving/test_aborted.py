"""Saves that a rank gives up: either they become no checkpoint, or every rank knows of it in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reprise.errors import LaunchError
from reprise.format.names import FORMAT, STATE
from reprise.ranks.channel import StoreChannel
from reprise.saving import checkpointer as checkpointer_module
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files
from reprise.tensors.live import Contents
from tests.fakes import JOIN_S, Axis, Sharding, all_ranks
from tests.unit.reprise.commit.test_protocol import ROWS, SPEC

COLUMNS = Sharding("columns over 2", (Axis("column", 2),))
SOON_S, LONG_S = 0.2, 60.0


@pytest.fixture(autouse=True, params=[False, True], ids=["apart", "on one host"])
def _hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "sharding", COLUMNS if request.param else ROWS)
    monkeypatch.setattr(Given, "local_ranks", (0, 1) if request.param else ())


class Given:
    """How the ranks of the tests hold the state, and which are said to be on one host."""

    sharding = ROWS
    local_ranks: tuple[int, ...] = ()


def contents(rank: int, iteration: int) -> Contents:
    live = tuple(Given.sharding.live(rank, [SPEC], {"w": torch.full(SPEC.shape, float(iteration))}))
    return Contents((SPEC,), live, {}, {STATE: {"format": FORMAT, "iteration": iteration}})


class Gate(Files):
    """A disk that stands still before the first file or folder of a name gets that name, until it is opened."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reached, self.opened = threading.Event(), threading.Event()

    def _stand(self, path: Path) -> None:
        if path.name == self._name:
            self.reached.set()
            assert self.opened.wait(JOIN_S)

    def write_new(self, path: Path, data: bytes) -> int:
        self._stand(path)
        return super().write_new(path, data)

    def rename(self, source: Path, target: Path) -> None:
        self._stand(target)
        super().rename(source, target)


class Deaf(StoreChannel):
    """A channel that does not hear the decision on the first attempt."""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        return Deaf(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)

    def read(self, key: str, *, sender: str = "a peer") -> bytes:
        if self.rank and key == "save/n-1/decision":
            raise LaunchError("No message from rank 0")
        return super().read(key, sender=sender)


def started(channel: StoreChannel, root: Path, files: Files, *, timeout_s: float) -> Checkpointer:
    policy = SavePolicy(root, async_save=True, commit_timeout_s=timeout_s)
    checkpointer = Checkpointer(policy, channel, nonce="n", files=files, local_ranks=Given.local_ranks)
    checkpointer.start()
    return checkpointer


def save(checkpointer: Checkpointer, channel: StoreChannel, iteration: int) -> None:
    assert checkpointer.save(iteration, contents(channel.rank, iteration)) is None


def outcome(checkpointer: Checkpointer) -> list[str | None]:
    """Return the error, or None, of each save that was not told yet."""
    checkpointer.wait()
    return [None if report.error is None else str(report.error) for report in checkpointer.reports()]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def on_two_ranks(call: Callable[[StoreChannel], list[list[str | None]]]) -> list[list[list[str | None]]]:
    return all_ranks(
        2, lambda channel: call(type(channel)(channel._source, channel.rank, world_size=2, timeout_s=LONG_S))
    )


def test_what_rank_0_gives_up_in_time_is_not_renamed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "_PATIENCE", LONG_S / SOON_S)
    gate = Gate("manifest.json")

    def call(channel: StoreChannel) -> list[list[str | None]]:
        timeout_s = SOON_S if channel.rank == 0 else LONG_S
        checkpointer = started(channel, tmp_path, gate, timeout_s=timeout_s)
        save(checkpointer, channel, 1)
        assert gate.reached.wait(JOIN_S)
        found = [outcome(checkpointer)]
        channel.agree("rank 0 has given it up, and rank 1 knows", None)
        gate.opened.set()
        checkpointer.drain(JOIN_S)
        assert channel.rank or names(tmp_path) == []
        channel.agree("rank 0's thread is through", None)
        checkpointer._policy = SavePolicy(tmp_path, async_save=True)
        save(checkpointer, channel, 1)
        found.append(outcome(checkpointer))
        checkpointer.close()
        return found

    first, second = on_two_ranks(call)
    for found in (first, second):
        assert "A save did not end in time" in str(found[0][0])
        assert found[1] == [None]
    assert names(tmp_path) == ["iter_0000001"]


def test_what_a_rank_gives_up_too_late_is_there_on_that_rank_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_PATIENCE", LONG_S / SOON_S)  # the thread still waits for the decision
    gate = Gate("iter_0000001")

    def call(channel: StoreChannel) -> list[list[str | None]]:
        checkpointer = started(channel, tmp_path, gate, timeout_s=LONG_S if channel.rank == 0 else SOON_S)
        save(checkpointer, channel, 1)
        assert gate.reached.wait(JOIN_S)  # rank 1's report is in
        found = []
        if channel.rank:
            found = [outcome(checkpointer)]
            gate.opened.set()
        else:
            assert gate.opened.wait(JOIN_S)
            found = [outcome(checkpointer)]
        channel.agree("rank 0 has committed it", None)
        save(checkpointer, channel, 1)
        found.append(outcome(checkpointer))
        checkpointer.close()
        return found

    first, second = on_two_ranks(call)
    assert first == [[None], []]
    ((error,), nothing) = second
    assert "may still be committed" in str(error)
    assert str(tmp_path / "iter_0000001") in str(error)
    assert nothing == []
    assert names(tmp_path) == ["iter_0000001"]


def test_a_rank_that_saves_again_early_learns_of_the_commit(tmp_path: Path) -> None:
    gate, store = Gate("iter_0000001"), HashStore()

    def call(channel: StoreChannel) -> list[list[str | None]]:
        channel = Deaf(channel._source, channel.rank, world_size=2, timeout_s=LONG_S)
        checkpointer = started(channel, tmp_path, gate, timeout_s=LONG_S)
        save(checkpointer, channel, 1)
        assert gate.reached.wait(JOIN_S)
        if channel.rank:
            found = [outcome(checkpointer)]  # nothing heard and nothing found
            save(checkpointer, channel, 1)
            gate.opened.set()
        else:
            assert gate.opened.wait(JOIN_S)
            found = [outcome(checkpointer)]
            save(checkpointer, channel, 1)
        found.append(outcome(checkpointer))
        save(checkpointer, channel, 2)
        found.append(outcome(checkpointer))
        checkpointer.close()
        return found

    outcomes = all_ranks(2, call, store=lambda: store)
    assert outcomes == [[[None], [], [None]], [["No message from rank 0."], [None], [None]]]
    for kind in ("report/1", "decision"):
        assert not store.check([f"save/n-1/{kind}"])
        assert not store.check([f"save/n-2/{kind}"])
    assert names(tmp_path) == ["iter_0000001", "iter_0000002"]
