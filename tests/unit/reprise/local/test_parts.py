"""Which local checkpoints are whole together, and who sends what to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reprise.format.host_file import Parts
from reprise.local.parts import assign, candidates

HOSTS = ("host-a", "host-b", "host-c")


def parts(*whole: int, manifest: str = "m") -> Parts:
    return Parts(manifest, HOSTS, whole)


def test_parts_with_one_manifest_are_one_checkpoint() -> None:
    old, new, other = parts(0, 1, manifest="old"), parts(0, manifest="new"), parts(1, 2, manifest="other")
    found = candidates([{4: old, 6: new}, {4: parts(2, manifest="old"), 6: other}])
    assert [(each.iteration, sorted(each.folders), each.together.missing) for each in found] == [
        (6, [1], ["host-a"]),
        (6, [0], ["host-b", "host-c"]),
        (4, [0, 1], []),
    ]
    assert found[0].together.describe_missing() == "1 of 3 parts: host-a"
    assert found[2].together.describe_missing() == ""


SETS = st.lists(st.frozensets(st.integers(0, 2)), min_size=2, max_size=4)


@given(SETS, st.data())
def test_every_part_comes_from_another_host_with_it(wholes: list[frozenset[int]], data: st.DataObject) -> None:
    folders = {number: parts(*whole) for number, whole in enumerate(wholes)}
    present = frozenset[int]().union(*wholes)
    needs = [{part: data.draw(st.integers(0, 9)) for part in sorted(present - whole)} for whole in wholes]
    transfers = assign(needs, folders)
    assert sorted((each.target, each.part, each.total_bytes) for each in transfers) == sorted(
        (target, part, size) for target, sizes in enumerate(needs) for part, size in sizes.items()
    )
    assert all(each.part in wholes[each.source] and each.source != each.target for each in transfers)
    assert transfers == sorted(transfers)


def test_hosts_that_have_the_same_share_the_sending() -> None:
    transfers = assign([{}, {}, {0: 5, 1: 3, 2: 2}], {0: parts(0, 1, 2), 1: parts(0, 1, 2), 2: parts()})
    assert sorted((each.source, each.total_bytes) for each in transfers) == [(0, 5), (1, 2), (1, 3)]
