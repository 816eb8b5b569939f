"""Which local checkpoints are whole together, and who sends what to whom."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reprise.format.host_file import HostFile, PieceNumbers, union, without
from reprise.local.survey import Candidate, PartSummary, assign, candidates, describe

WRITERS = {"a": (0, 1, 1), "b": (1,), "c": (0,)}


def host_file(host: int, *, manifest: str = "m", held: PieceNumbers | None = None) -> HostFile:
    known = HostFile("n-1", manifest, host, ("host-a", "host-b"), WRITERS, {})
    return replace(known, held=known.own if held is None else held)


def test_parts_with_one_manifest_are_one_checkpoint() -> None:
    old, new = host_file(0, manifest="old"), host_file(0, manifest="new")
    found = candidates([{4: old, 6: new}, {4: host_file(1, manifest="old"), 6: host_file(1, manifest="other")}])
    assert [(c.iteration, sorted(c.parts), bool(c.missing)) for c in found] == [
        (6, [1], True),
        (6, [0], True),
        (4, [0, 1], False),
    ]


def test_missing_pieces_are_named_by_the_host_that_wrote_them() -> None:
    candidate = Candidate(6, "m", {0: host_file(0)})
    assert candidate.missing == {"a": (1, 2), "b": (0,)}
    assert candidate.describe_missing() == "3 of 3 pieces of host host-b (a, b)"
    assert Candidate(6, "m", {0: host_file(0), 1: host_file(1)}).describe_missing() == ""
    assert describe({}, host_file(0)) == ""


PIECES = [(name, number) for name, writers in WRITERS.items() for number in range(len(writers))]


def as_numbers(pieces: frozenset[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    return union([{name: (number,)} for name, number in pieces])


SETS = st.frozensets(st.sampled_from(PIECES)).map(as_numbers)


@given(SETS, st.sampled_from([None, 0, 1]))
def test_a_part_is_the_same_after_its_summary(held: PieceNumbers, host: int | None) -> None:
    part = replace(host_file(0, held=held), host=host)
    row = json.loads(json.dumps(PartSummary.of(part).row()))
    other = host_file(1)
    assert PartSummary.from_row(row).part(other, other.by_writer()) == part


@given(st.lists(st.tuples(SETS, SETS), min_size=1, max_size=4))
def test_every_piece_comes_from_a_host_that_has_it_or_is_left(hosts: list[tuple[PieceNumbers, PieceNumbers]]) -> None:
    found = {number: host_file(0, held=held) for number, (held, _) in enumerate(hosts)}
    needs = [without(wanted, held) for held, wanted in hosts]
    transfers, left = assign(needs, found)
    for number, need in enumerate(needs):
        arriving = [transfer for transfer in transfers if transfer.target == number]
        parts = [*(transfer.pieces for transfer in arriving), left[number]]
        assert union(parts) == need
        assert sum(len(members) for part in parts for members in part.values()) == sum(map(len, need.values()))
        for transfer in arriving:
            assert transfer.source != number
            assert not without(transfer.pieces, found[transfer.source].held)
        assert not any(
            name in host.held and piece in host.held[name]
            for name, pieces in left[number].items()
            for piece in pieces
            for other, host in found.items()
            if other != number
        )
    order = [(transfer.source, transfer.target) for transfer in transfers]
    assert order == sorted(set(order))


def test_the_more_complete_of_two_is_first_and_named_by_hosts() -> None:
    whole = host_file(0, manifest="z", held=union([host_file(0).own, host_file(1).own]))
    assert [c.manifest for c in candidates([{6: host_file(0, manifest="a")}, {6: whole}])] == ["z", "a"]
    assert PartSummary.of(whole).row()[-2:] == [(0, 1), {}]


def test_hosts_that_have_the_same_share_the_sending() -> None:
    everything = as_numbers(frozenset(PIECES))
    found = {0: host_file(0, held=everything), 1: host_file(0, held=everything)}
    transfers, left = assign([{}, {}, everything], found)
    assert left == [{}, {}, {}]
    assert sorted(sum(map(len, transfer.pieces.values())) for transfer in transfers) == [2, 3]
