"""Rendezvous for a launch's ranks in a store, which may outlive the launch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from reprise.errors import LaunchError


def rendezvous(store: Store, rank: int, *, world_size: int, timeout_s: float) -> str:
    """Return a new name, the same on all ranks, once all ranks have joined. Collective.

    torchrun's agents keep the store over restarts, and each agent counts only its own node's restarts. Neither the
    count nor a key in the store distinguishes this launch from a dead launch. So rank 0 draws a random name. Every
    other rank stores a random word under the name in the store, until the word comes back: only a living rank 0 returns
    it.

    Raises:
        LaunchError: A rank does not join within `timeout_s`. Rank 0 names the missing ranks.
        DistError: The store is gone.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02 + world_size / 20_000  # at most about 20,000 store requests per second, for any rank count
    key = f"rendezvous/{world_size}"

    def pause() -> bool:
        """Sleep, then return whether time is left."""
        time.sleep(pause_s)
        return time.monotonic() < deadline

    if rank:
        return _join(store, rank, key, pause, timeout_s)
    name = secrets.token_hex(4)
    store.set(key, name)
    missing = list(range(1, world_size))
    while missing := [peer for peer in missing if not store.check([f"{name}/hello/{peer}"])]:
        if not pause():
            raise LaunchError(
                f"Rank {', '.join(map(str, missing))} did not join within {timeout_s:.0f} s",
                fix="Check that rank's log and host; it may be dead or hung.",
            )
    for peer in range(1, world_size):
        store.set(f"{name}/welcome/{peer}", store.get(f"{name}/hello/{peer}").decode())
    return name


def _join(store: Store, rank: int, key: str, pause: Callable[[], bool], timeout_s: float) -> str:
    word, name = secrets.token_hex(4), ""
    while True:
        current = store.get(key).decode() if store.check([key]) else ""
        if current != name:
            name = current
            store.set(f"{name}/hello/{rank}", word)
        if name and store.check([f"{name}/welcome/{rank}"]) and store.get(f"{name}/welcome/{rank}") == word.encode():
            return name
        if not pause():
            raise LaunchError(
                f"Rank 0 did not admit rank {rank} within {timeout_s:.0f} s: rank 0 or another rank did not join",
                fix="Check the logs and hosts of the other ranks.",
            )
