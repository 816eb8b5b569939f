"""What a run may lose in a power failure, on a disk that keeps for certain what was synced and nothing else.

POSIX makes a file's content durable by fsync of the file, and a name by fsync of its folder; of what was changed since,
anything may survive. `StrictDisk` follows the calls of a run by these rules alone. So what holds here holds for every
cut on every file system; `scripts/faults/soak_power.py` cuts real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise import copy, save_state_dict
from reprise.storage import iteration_of
from tests.crash.hosts import run_trainer
from tests.crash.tracing import Tracer
from tests.harness import TINY, call_on_ranks
from tests.profiles import slow
from trainer.metrics.run_log import RunLog

KEEP = 2
RUN = ("runs", "first", "run")  # of which the last folder's parents are not there either
CHECKPOINTS = (*RUN, "checkpoints")
Event = list[Any]


class StrictDisk:
    """What a disk holds for certain, and what it may hold.

    Args:
        root: the inode of a folder that was there, and durable, before.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._names: dict[int, dict[str, int]] = {root: {}}  # by folder, as the running system sees them
        self._synced: dict[int, dict[str, int]] = {root: {}}  # as they were when the folder was synced last
        self._possible: dict[int, set[tuple[str, int]]] = {root: set()}  # all there were from then on
        self._unsynced = set[int]()  # files

    def take(self, event: Event) -> None:
        """Follow one change or sync."""
        match event:
            case ["folder", parent, name, inode]:
                self._name(parent, name, inode)
                self._names[inode], self._synced[inode], self._possible[inode] = {}, {}, set()
            case ["file", parent, name, inode]:
                self._name(parent, name, inode)
                self._unsynced.add(inode)
            case ["link", parent, name, inode]:
                self._name(parent, name, inode)
            case ["write", inode]:
                self._unsynced.add(inode)
            case ["sync", inode]:
                self._unsynced.discard(inode)
                if inode in self._names:
                    self._synced[inode] = dict(self._names[inode])
                    self._possible[inode] = set(self._names[inode].items())
            case ["rename", parent, name, target]:
                self._name(parent, target, self._names[parent].pop(name))
            case ["remove", parent, name]:
                del self._names[parent][name]

    def missing(self, path: Sequence[str]) -> list[str]:
        """Return which names on a path from the root a power failure may take."""
        folder, found = self._root, []
        for name in path:
            inode = self._names[folder].get(name)
            if inode is None or self._synced[folder].get(name) != inode:
                found.append(name)
            if inode is None:
                break
            folder = inode
        return found

    def unsure(self, inode: int, name: str) -> Iterator[str]:
        """Yield what, of a file or of all that is in a folder, may be another after a power failure."""
        if inode not in self._names:
            if inode in self._unsynced:
                yield name
            return
        if self._names[inode] != self._synced[inode]:
            yield f"{name}/"
        for inner, below in self._names[inode].items():
            yield from self.unsure(below, f"{name}/{inner}")

    def inode(self, parent: int, name: str) -> int:
        """Return what has a name in a folder now."""
        return self._names[parent][name]

    def listed(self, path: Sequence[str]) -> list[str]:
        """Return the names in a folder now."""
        folder = self._root
        for name in path:
            folder = self._names[folder][name]
        return sorted(self._names[folder])

    def checkpoint_around(self, inode: int) -> str | None:
        """Return the committed iteration that a folder may be, or lie in, now or after a power failure."""
        for folder, names in self._possible.items():
            for name, child in names:
                if child == inode:
                    found = name if iteration_of(Path(name)) is not None else self.checkpoint_around(folder)
                    if found is not None:
                        return found
        return None

    def _name(self, parent: int, name: str, inode: int) -> None:
        self._names[parent][name] = inode
        self._possible[parent].add((name, inode))


def problems(events: Sequence[Event], root: int) -> list[str]:
    """Return what a power failure after any of the events could damage or lose."""
    disk, found = StrictDisk(root), list[str]()
    for event in told_apart(events, root):
        found += _broken_rules(disk, event)
        disk.take(event)
    return found


def told_apart(events: Sequence[Event], root: int) -> Iterator[Event]:
    """Yield the events with a number of its own for each file and folder: inodes are used again."""
    numbers = {root: root}
    for count, (kind, *rest) in enumerate(events, start=root + 1):
        if kind in ("folder", "file"):
            parent, name, inode = rest
            numbers[inode] = count
            yield [kind, numbers[parent], name, count]
        elif kind == "link":
            parent, name, inode = rest
            yield [kind, numbers[parent], name, numbers[inode]]
        elif kind == "saved":
            yield [kind, *rest]
        else:
            yield [kind, numbers[rest[0]], *rest[1:]]


def _broken_rules(disk: StrictDisk, event: Event) -> Iterator[str]:
    match event:
        case ["rename", parent, name, target]:
            if iteration_of(Path(target)) is not None:
                yield from (
                    f"{target} appears before {each} is synced" for each in disk.unsure(disk.inode(parent, name), name)
                )
            elif (iteration := iteration_of(Path(name))) is not None:
                newer = [other for other in disk.listed(CHECKPOINTS) if (iteration_of(Path(other)) or 0) > iteration]
                if sum(not disk.missing([*CHECKPOINTS, other]) for other in newer) < KEEP:
                    yield f"{name} goes before {KEEP} newer ones are durable"
        case ["remove" | "file" | "folder", parent, name, *_]:
            checkpoint = disk.checkpoint_around(parent)
            if checkpoint is not None:
                yield f"{name} changes in {checkpoint}, which may still be there"
        case ["write", inode]:
            checkpoint = disk.checkpoint_around(inode)
            if checkpoint is not None:
                yield f"a file of {checkpoint} is written, which may still be there"
        case ["saved", iteration]:
            for path in ([*CHECKPOINTS, f"iter_{iteration:07d}"], [*RUN, "metrics.jsonl"]):
                yield from (
                    f"iteration {iteration} is saved before the name {name} is durable" for name in disk.missing(path)
                )


def traced(arguments: list[str]) -> None:
    """Train, and note every change below a folder and every save that is told."""
    disk, notes = map(Path, arguments[:2])
    tracer = Tracer(disk, notes)
    save = RunLog.save

    def told(self: RunLog, report: Any, **keywords: Any) -> None:
        save(self, report, **keywords)
        tracer.say("saved", report.iteration)

    RunLog.save = told  # type: ignore[method-assign]
    tracer.install()
    run_trainer(arguments[2:])


SHARED = ("checkpoint.save_interval=1", f"checkpoint.max_checkpoint_keep={KEEP}")
LOCAL = (
    "checkpoint.save=null",
    "checkpoint.local.dir=${run.dir}/checkpoints",
    "checkpoint.local.save_interval=1",
    f"checkpoint.local.keep={KEEP}",
)


@pytest.fixture(
    scope="module",
    params=[(1, SHARED), slow((2, SHARED)), (1, LOCAL)],
    ids=["1 rank", "2 ranks", "1 rank, local"],
)
def events(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], int]:
    """Return what a run changed that was resumed once, and the inode of the folder that was there before."""
    ranks, saving = request.param
    folder = tmp_path_factory.mktemp("traced")
    disk, notes = folder / "disk", folder / "notes"
    disk.mkdir()
    for iterations in (4, 7):
        run = [f"run.dir={disk.joinpath(*RUN)}", f"train.train_iters={iterations}", "schedule.lr_decay_iters=7"]
        arguments = [str(disk), str(notes), *run, *TINY, "model=gpt2_tiny", *saving]
        ended = call_on_ranks(traced, arguments, folder=folder / "out", ranks=ranks)
        assert ended.ok, ended.text
    return [json.loads(line) for line in notes.read_text().splitlines()], disk.stat().st_ino


def test_a_save_is_reported_once_no_power_failure_can_lose_it(events: tuple[list[Event], int]) -> None:
    saved = [event[1] for event in events[0] if event[0] == "saved"]
    assert saved == [1, 2, 3, 4, 5, 6, 7]
    assert problems(*events) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("run", "iteration 1 is saved before the name checkpoints is durable"),
        ("checkpoints", "iteration 1 is saved before the name iter_0000001 is durable"),
        ("checkpoints", "changes in iter_0000001, which may still be there"),
        ("optimizer", "iter_0000001 appears before"),
        ("model.safetensors", "iter_0000001 appears before"),
        ("manifest.json", "iter_0000001 appears before"),
    ],
)
def test_a_sync_that_is_left_out_is_found(events: tuple[list[Event], int], name: str, problem: str) -> None:
    changes, root = events
    inodes, kept = set[int](), list[Event]()
    for event in changes:
        if event[0] in ("folder", "file"):
            (inodes.add if event[2] == name else inodes.discard)(event[3])
        if not (event[0] == "sync" and event[1] in inodes):
            kept.append(event)
    assert len(kept) < len(changes)
    found = problems(kept, root)
    assert [each for each in found if problem in each]
    if name == "checkpoints" and any(event[0] == "link" for event in changes):  # files of a local save are used again
        assert "a file of iter_0000001 is written, which may still be there" in found


def test_a_deletion_before_its_successors_are_durable_is_found(events: tuple[list[Event], int]) -> None:
    changes, root = events
    first = next(number for number, event in enumerate(changes) if event[2:3] == ["iter_0000001"])
    assert changes[first][0] == "rename"
    newer = next(number for number, event in enumerate(changes) if event[3:] == ["iter_0000003"])
    early = [*changes[:newer], changes[first], *changes[newer:first], *changes[first + 1 :]]
    assert f"iter_0000001 goes before {KEEP} newer ones are durable" in problems(early, root)


def copied(arguments: list[str]) -> None:
    """Copy a run's checkpoints, and note every change below a folder."""
    disk, notes, source = map(Path, arguments)
    Tracer(disk, notes).install()
    copy(source, disk / "copies")


def test_a_copy_is_durable_when_it_has_its_name_and_after(tmp_path: Path) -> None:
    disk, notes = tmp_path / "disk", tmp_path / "notes"
    disk.mkdir()
    save_state_dict(tmp_path / "run", {"model": {"weight": torch.ones(3)}, "step": 3}, iteration=3)
    ended = call_on_ranks(copied, [str(disk), str(notes), str(tmp_path / "run")], folder=tmp_path / "out", ranks=1)
    assert ended.ok, ended.text
    events, root = [json.loads(line) for line in notes.read_text().splitlines()], disk.stat().st_ino
    assert problems(events, root) == []
    after = StrictDisk(root)
    for event in told_apart(events, root):
        after.take(event)
    assert after.missing(["copies", "iter_0000003", "model.safetensors"]) == []
