"""Ranks that meet on a store on which others have met, or have failed to, before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from reprise.errors import LaunchError
from tests.crash.moments import await_true
from tests.fakes import JOIN_S
from tests.messages import refused
from trainer.launch.rendezvous import rendezvous


def together(store: Store, ranks: list[int], world_size: int, timeout_s: float = JOIN_S) -> list[str | LaunchError]:
    def call(rank: int) -> str | LaunchError:
        try:
            return rendezvous(store, rank, world_size=world_size, timeout_s=timeout_s)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def test_all_ranks_get_the_same_name_and_another_one_each_time() -> None:
    store = HashStore()
    groups = [set(together(store, [*reversed(range(size))], size)) for size in (2, 3, 2, 4, 2)]
    assert {len(group) for group in groups} == {1}
    assert len(set.union(*groups)) == 5


def test_a_rank_that_comes_first_does_not_meet_the_dead() -> None:
    store = HashStore()
    (old, _) = together(store, [0, 1], 2)
    found = list[str]()
    early = threading.Thread(target=lambda: found.append(rendezvous(store, 1, world_size=2, timeout_s=JOIN_S)))
    early.start()
    # It has greeted under the old name: there lies another word than the one that was answered.
    await_true(lambda: store.get(f"{old}/hello/1") != store.get(f"{old}/welcome/1"))
    assert not found
    name = rendezvous(store, 0, world_size=2, timeout_s=JOIN_S)
    early.join(JOIN_S)
    assert found == [name]
    assert name != old


def test_rank_0_names_the_missing_ranks() -> None:
    first, second = together(HashStore(), [0, 2], 5, timeout_s=2.0)
    assert "Rank 1, 3, 4" in str(first)
    assert isinstance(second, LaunchError)


def test_a_rank_without_rank_0_gives_up_in_time() -> None:
    with refused(LaunchError, "rank 1"):
        rendezvous(HashStore(), 1, world_size=2, timeout_s=0.2)


def test_a_failed_meeting_does_not_spoil_the_next() -> None:
    store = HashStore()
    assert all(isinstance(found, LaunchError) for found in together(store, [0, 1], 3, timeout_s=0.2))
    found = together(store, [1, 2, 0], 3)
    assert len(set(found)) == 1
    assert isinstance(found[0], str)
