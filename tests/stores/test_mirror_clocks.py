"""`mirror_keep` in a store whose clock differs from the host's, or is set: nothing held goes, and no dead hold stays.

A folder stands for the store. Its clock and the host's are the test's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from reprise.files import location
from reprise.folder import StoredHold, take_hold
from reprise.storage.holds import EXPIRY_S
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.store import end_child
from tests.crash.test_clocks import CLOCKS, DAY_S
from tests.stores.saving import committed, save
from tests.stores.test_mirror_pass import InterruptedClient, Site, names_of

# A store set further ahead than this has no beat of the last ten minutes by its own clock, until the next beat.
SETTINGS = [("host_s", set_s) for set_s in CLOCKS] + [("store_s", set_s) for set_s in CLOCKS if set_s < EXPIRY_S]


@dataclass
class Clocks:
    """The time that passes, and how far ahead of it are the clocks of the store and the host."""

    now: float = 1.8e9
    store_s: float = 0.0
    host_s: float = 0.0

    def stamp(self, key: str) -> None:
        os.utime(f"/{key}", (self.now + self.store_s,) * 2)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Stamp what the mirror and the holds write by the store's clock. Holds beat where the test says so."""
    clocks, put, write = Clocks(), StoreClient.put, StoredHold._write

    def put_and_stamp(client: StoreClient, key: str, data: bytes) -> str | None:
        etag = put(client, key, data)
        clocks.stamp(key)
        return etag

    def write_and_stamp(hold: StoredHold) -> None:
        write(hold)
        clocks.stamp(hold._key)

    monkeypatch.setattr(StoreClient, "put", put_and_stamp)
    monkeypatch.setattr(StoredHold, "_write", write_and_stamp)
    monkeypatch.setattr("reprise.stores.holds.HEARTBEAT_S", threading.TIMEOUT_MAX)
    monkeypatch.setattr(time, "time", lambda: clocks.now + clocks.host_s)
    return clocks


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path)
    end_child()


def take(site: Site, iteration: int) -> StoredHold:
    hold = take_hold(location(f"{site.url}/{names_of(iteration)[0]}"))
    assert isinstance(hold, StoredHold)
    return hold


def names_after(passes: MirrorPass, site: Site) -> list[str]:
    """Return the checkpoints of the store once its mirror has nothing left to do."""
    while not passes.run():
        pass
    return committed(site.store)


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_mirror_deletes_by_the_clock_of_the_store(site: Site, clocks: Clocks, ahead_s: float) -> None:
    clocks.store_s = ahead_s
    save(site.folder, [5, 10, 15, 20])
    site.mirror()
    hold, of_dead = take(site, 5), take(site, 10)  # which never beats
    passes = site.passes(keep=2)
    clocks.now += EXPIRY_S - 1
    assert names_after(passes, site) == names_of(5, 10, 15, 20)
    hold._write()
    clocks.now += 1
    assert names_after(passes, site) == names_of(5, 15, 20)
    clocks.now += EXPIRY_S - 2
    save(site.folder, [25])
    assert names_after(passes, site) == names_of(5, 20, 25)
    clocks.now += 1
    assert names_after(passes, site) == names_of(20, 25)
    for each in (hold, of_dead):
        each.release()
    assert not list(site.store.rglob("hold.*"))


def test_a_clock_set_amid_a_mirror_deletes_nothing_held(site: Site, clocks: Clocks) -> None:
    save(site.folder, [5, 10])
    site.mirror()
    hold, passes = take(site, 5), site.passes(keep=1)
    for clock, set_s in SETTINGS:
        for number in count(1):  # of the request before which it is set
            hold._write()
            clocks.now += EXPIRY_S - 1 - max(0.0, set_s if clock == "store_s" else 0.0)
            client = InterruptedClient(site.url.root, number, partial(setattr, clocks, clock, set_s))
            passes._client = client
            assert names_after(passes, site) == names_of(5, 10), (clock, set_s, client.key)
            setattr(clocks, clock, 0.0)
            if client.left > 0:
                break
    assert number == 5  # a listing, and a look at the store's clock of three requests
    clocks.store_s = DAY_S
    hold._write()
    clocks.now += EXPIRY_S - 1
    assert names_after(passes, site) == names_of(5, 10)
    clocks.store_s = 0.0  # the last beat lies in the future
    assert names_after(passes, site) == names_of(5, 10)
    clocks.now += DAY_S + 1
    assert names_after(passes, site) == names_of(10)
    hold.release()
