"""Checkpoint folders for the tests of stores, and what a reader of a store sees."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprise.format import FORMAT, MANIFEST, STATE
from reprise.format.lineage import FRESH, Branch, Lineage
from reprise.ranks import single_rank_channel
from reprise.saving import Checkpointer, SavePolicy
from reprise.storage import iteration_name
from reprise.stores.child import Server
from reprise.stores.client import StoreClient
from reprise.stores.upload import MARK
from tests.fakes import lone_contents

RUN = Lineage((Branch("the-run", FRESH),))
FILE_BYTES = 16 << 10


class WatchedClient(StoreClient):
    """A client whose every request, and every deletion of an object, is made by `watch`, from a call and its values."""

    def __init__(self, watch: Callable[..., Any]) -> None:
        for name in ("head", "read", "read_text", "objects", "put", "create", "delete"):
            setattr(self, name, partial(watch, getattr(self, name)))
        delete_one = self.delete
        self.delete = lambda folder, names: [delete_one(folder, [name]) for name in names] and None  # type: ignore[method-assign, assignment]


def asking(server: Server) -> Callable[..., Any]:
    """Return a `Child.ask` whose calls a server in this process makes."""

    def ask(_: object, call: str, *details: Any) -> Any:
        answer = getattr(server, call)(*details)
        return os.dup(answer.fileno()) if call == "open" else answer

    return ask


def save(
    folder: Path, iterations: Sequence[int], *, lineage: Lineage = RUN, files: int = 3, nonce: str = "n", add: float = 0
) -> None:
    """Save checkpoints whose values depend on their iteration; `files` is the number of their tensor files."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpointer = Checkpointer(SavePolicy(folder, file_bytes=FILE_BYTES), single_rank_channel(), nonce=nonce)
    checkpointer.start()
    for iteration in iterations:
        document = {"format": FORMAT, "iteration": iteration, "run": lineage.record()}
        values = {f"w{number}": torch.full((FILE_BYTES // 4,), iteration + add) for number in range(files)}
        report = checkpointer.save(iteration, lone_contents(values, {STATE: document}))
        assert report is not None
        assert report.error is None
    checkpointer.close()


def give_up(folder: Path, iteration: int) -> None:
    """Rename an iteration as a run does that goes on from an earlier one."""
    path = folder / iteration_name(iteration)
    path.rename(path.with_name(f"{path.name}.superseded-1"))


def lose(folder: Path, iteration: int) -> None:
    """Delete an iteration, as retention does."""
    shutil.rmtree(folder / iteration_name(iteration))


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder by its name in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def committed(store: Path) -> list[str]:
    """Return the names of the checkpoints that a reader of a store sees."""
    return sorted(str(path.parent.relative_to(store)) for path in store.rglob(MANIFEST))


def assert_whole(store: Path, folder: Path) -> list[str]:
    """Return the checkpoints of a store, each of which equals one save of it in a run's folder to the last byte."""
    names = committed(store)
    for name in names:
        stored = {file: data for file, data in content(store / name).items() if not file.startswith(MARK)}
        saves = [folder / name, *(folder / name).parent.glob(f"{Path(name).name}.superseded-*")]
        assert stored in [content(path) for path in saves if path.exists()], name
    return names
