"""Hosts and their leaders."""

from __future__ import annotations

from reprise.commit import attempt
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


def test_hosts_travel_in_bytes_that_hardly_grow_with_them() -> None:
    sizes = []
    for hosts in (32, 2048):
        rows = [(f"node{rank // 8:04}", rank // 8 * 8) for rank in range(8 * hosts)]
        sizes.append(len(attempt._packed(rows)))
        found = attempt._unpacked(attempt._packed(rows))
        assert found.leaders == tuple(range(0, 8 * hosts, 8))
        assert found.ranks_with(13) == tuple(range(8, 16))
        assert found.names == tuple(f"node{host:04}" for host in range(hosts))
    assert sizes[1] < 6500  # three bytes a name


def test_ranks_of_a_host_need_not_follow_each_other() -> None:
    rows = [("b", 0), ("a", 1), ("b", 0), ("b", 0), ("a", 1)]
    assert attempt._unpacked(attempt._packed(rows)) == Hosts(("b", "a"), ((0, 2, 3), (1, 4)))


def test_all_ranks_find_the_same_hosts() -> None:
    local = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 4: ()}
    found = run_ranks(5, lambda channel: find_hosts(channel, local[channel.rank], "k"))
    assert all(isinstance(hosts, Hosts) and hosts == found[0] for hosts in found)
    assert isinstance(found[0], Hosts)
    assert found[0].ranks == ((0, 1), (2, 3), (4,))
