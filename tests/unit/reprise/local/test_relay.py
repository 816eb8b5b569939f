"""The JSON files of a save go from leader to leader, and come from the store where a link fails."""

from __future__ import annotations

import threading

import pytest

from reprise.commit.attempt import Hosts
from reprise.commit.channel import StoreChannel
from reprise.local import relay
from reprise.local.relay import FileRelay
from tests.fakes import all_ranks, tcp_store

HOSTS = 7
MESSAGE = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class CountedReads:
    """The channel of a commit, which counts what is read in the store."""

    coordinator = 0

    def __init__(self, channel: StoreChannel) -> None:
        self._channel, self.keys = channel, list[str]()

    def read(self, key: str, *, sender: str) -> bytes:
        self.keys.append(key)
        return self._channel.read(key, sender=sender)


def read_on_hosts(*keys: str, away: int | None = None, late: int | None = None) -> list[list[str]]:
    """Let all hosts read these messages of rank 0, and return by host which keys it read in the store.

    Args:
        away: a host that reads nothing.
        late: a host that leaves the first message out.
    """
    ended = threading.Barrier(HOSTS)

    def run(channel: StoreChannel) -> list[str]:
        counted, hosts = CountedReads(channel), Hosts(("h",) * HOSTS, tuple((rank,) for rank in range(HOSTS)))
        files = FileRelay(channel, hosts, nonce="n", timeout_s=60.0)
        try:
            for key in keys:
                if channel.rank == 0:
                    channel.put(key, key.encode() + MESSAGE)
                elif channel.rank != away and not (channel.rank == late and key == keys[0]):
                    assert files.read(counted, key) == key.encode() + MESSAGE  # type: ignore[arg-type]
            ended.wait(60.0)
        finally:
            files.close()
        return counted.keys

    return all_ranks(HOSTS, run, store=tcp_store)


def test_two_hosts_read_the_store_for_all() -> None:
    both = ["first", "second"]
    assert read_on_hosts(*both) == [[], both, both, [], [], [], []]


def test_a_message_that_a_host_left_out_is_passed_over() -> None:
    assert read_on_hosts("first", "second", late=5)[3:] == [[], [], [], []]


def test_hosts_below_a_lost_one_read_the_store_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay, "_PATIENCE_S", 1.0)
    both = ["first", "second"]
    assert read_on_hosts(*both, away=1)[:5] == [[], [], both, both, both]  # a slow machine may cut other links too
    assert len([line for line in caplog.messages if "come from the store" in line]) >= 2
