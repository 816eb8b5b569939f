"""Lets the ranks of one launch find each other on a store that may outlive it. What they do then is told elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.errors import LaunchError


def meet(store: Store, rank: int, *, world_size: int, timeout_s: float) -> str:
    """Return a new name, the same on all ranks, once all ranks are here. A call of all ranks.

    torchrun's agents keep the store over restarts, and each counts those of its own node: neither their number nor a
    key that hangs there tells this launch from a dead one. So rank 0 draws a name, and every other rank greets under
    the name it finds with a word of its own, until that word comes back: only a living rank 0 returns it.

    Raises:
        LaunchError: if not all are here within `timeout_s`; rank 0 names those who are missing.
        DistError: if the store is gone.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = (
        0.02 + world_size / 20_000
    )  # however many ranks wait, the store's host is asked some 20,000 times a second
    key = f"meeting/{world_size}"
    if rank:
        return _join(store, rank, key, lambda: _pause(deadline, pause_s), timeout_s)
    name = secrets.token_hex(4)
    store.set(key, name)
    missing = list(range(1, world_size))
    while missing := [other for other in missing if not store.check([f"{name}/hello/{other}"])]:
        if not _pause(deadline, pause_s):
            problem = f"Rank {', '.join(map(str, missing))} did not come within {timeout_s:.0f} s"
            store.set(f"{name}/problem", problem)
            raise LaunchError(problem, fix="Look at that rank's log and host; it may have died or hang.")
    for other in range(1, world_size):
        store.set(f"{name}/welcome/{other}", store.get(f"{name}/hello/{other}").decode())
    return name


def _join(store: Store, rank: int, key: str, pause: Callable[[], bool], timeout_s: float) -> str:
    word, name = secrets.token_hex(4), ""
    while True:
        found = store.get(key).decode() if store.check([key]) else ""
        if found != name:
            name = found
            store.set(f"{name}/hello/{rank}", word)
        if name and store.check([f"{name}/welcome/{rank}"]) and store.get(f"{name}/welcome/{rank}") == word.encode():
            return name
        if name and store.check([f"{name}/problem"]):
            problem = store.get(f"{name}/problem").decode()
        else:
            problem = f"Rank 0 did not let rank {rank} in within {timeout_s:.0f} s: it, or another rank, has not come"
        if not pause():
            raise LaunchError(problem, fix="Look at the other ranks' logs and hosts.")


def _pause(deadline: float, pause_s: float) -> bool:
    """Wait a little; return whether there is time left."""
    time.sleep(pause_s)
    return time.monotonic() < deadline
