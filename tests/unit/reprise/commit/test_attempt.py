"""Hosts and their leaders."""

from __future__ import annotations

from reprise.commit.attempt import Hosts, find_hosts
from tests.fakes import run_ranks


def test_a_shared_folder_is_that_of_one_host() -> None:
    shared = Hosts.shared(3)
    assert shared.leaders == (0,)
    assert [shared.leader_of(rank) for rank in range(3)] == [0, 0, 0]
    assert shared.ranks_with(1) == (0, 1, 2)


def test_the_first_rank_of_each_host_leads() -> None:
    hosts = Hosts(("a", "b"), ((0, 1), (2, 3)))
    assert hosts.leaders == (0, 2)
    assert [hosts.number_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [hosts.leader_of(rank) for rank in range(4)] == [0, 0, 2, 2]


def test_all_ranks_find_the_same_hosts() -> None:
    local = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 4: ()}
    found = run_ranks(5, lambda channel: find_hosts(channel, local[channel.rank], "k"))
    assert all(isinstance(hosts, Hosts) and hosts == found[0] for hosts in found)
    assert isinstance(found[0], Hosts)
    assert found[0].ranks == ((0, 1), (2, 3), (4,))
