"""Which checkpoints are of a run, and of the branch that it goes on along."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import CheckpointError
from reprise.format.lineage import FRESH, LINEAGE, Branch, Journal, Lineage, Parent, newest_lineage, saved_lineage
from reprise.local.parts import Parts, candidates
from reprise.storage.json_file import Json
from tests.messages import refused
from tests.profiles import examples

A = Lineage((Branch("a", FRESH),))
B = Lineage((*A.branches, Branch("b", 4)))
C = Lineage((*B.branches, Branch("c", 2)))


def test_checkpoints_without_a_lineage_are_of_an_upgraded_run() -> None:
    assert not A.admits(Lineage(), 0)
    upgraded = Lineage((Branch("a", 6),))
    assert [iteration for iteration in range(8) if upgraded.admits(Lineage(), iteration)] == [0, 1, 2, 3, 4, 5, 6]
    assert Lineage().admits(Lineage(), 3)


def test_branches_that_a_start_did_not_know_are_admitted() -> None:
    assert A.admits(B, 6)
    assert Lineage().admits(C, 3)


def test_the_lineage_with_the_most_rewinds_is_the_newest() -> None:
    assert newest_lineage([A, C, B]) == C
    assert newest_lineage([]) == Lineage()


@pytest.mark.parametrize("lineage", [A, C, Lineage(A.branches, Parent("x", 7)), Lineage(A.branches, Parent(None, 0))])
def test_a_record_is_read_as_it_was_written(lineage: Lineage) -> None:
    launched = replace(lineage, launch=("a", "b"))
    assert Journal.from_bytes(Journal(launched).to_bytes(), where="run.json").lineage.launch == ("a", "b")
    for saved in (None, FRESH, 7):
        journal = Journal(lineage, saved)
        assert Journal.from_bytes(journal.to_bytes(), where="run.json") == journal
    assert saved_lineage({LINEAGE: lineage.record()}, where="state") == lineage
    assert saved_lineage({"iteration": 3}, where="state") == Lineage()


@pytest.mark.parametrize(
    "record",
    [
        5,
        {},
        {"branches": []},
        {"branches": {"id": "a"}},
        {"branches": [{"id": "a"}]},
        {"branches": [{"id": 7, "began_at": 0}]},
        {"branches": [{"id": "a", "began_at": -2}]},
        {"branches": [{"id": "a", "began_at": True}]},
        {"branches": [{"id": "a", "began_at": 0}], "parent": []},
        {"branches": [{"id": "a", "began_at": 0}], "launch": "a"},
        {"branches": [{"id": "a", "began_at": 0}], "launch": [7]},
        {"branches": [{"id": "a", "began_at": 0}], "parent": {"run": "b"}},
        {"branches": [{"id": "a", "began_at": 0}], "parent": {"run": "b", "iteration": -1}},
    ],
)
def test_a_malformed_record_is_refused(record: Json) -> None:
    with refused(CheckpointError):
        saved_lineage({LINEAGE: record}, where="state")


PIECES, HOSTS = frozenset(range(3)), range(3)
SHARES = (PIECES, PIECES, PIECES, frozenset({0, 1}), frozenset({2}), frozenset[int]())


@dataclass
class Saved:
    """A checkpoint, and whether the run may still go on from it."""

    iteration: int
    lineage: Lineage
    manifest: str
    is_current: bool
    held: dict[int, frozenset[int]] = field(default_factory=dict)

    def parts(self, host: int) -> Parts:
        return Parts(self.manifest, ("a", "b", "c"), self.held[host])


@examples(150)
@given(st.data())
def test_a_start_takes_the_newest_whole_checkpoint_of_its_branch(data: st.DataObject) -> None:
    lineage, iteration = A, 0
    folders: dict[int, dict[int, Saved]] = {host: {} for host in HOSTS}
    everything, recorded = list[Saved](), list[int]()
    present = data.draw(st.sets(st.sampled_from(HOSTS), min_size=1))
    for number in range(data.draw(st.integers(1, 14))):
        match data.draw(st.sampled_from(["save", "save", "save", "start", "start", "start", "damage", "another run"])):
            case "save":
                iteration += 1
                saved = Saved(iteration, lineage, f"m{number}", is_current=True)
                saved.held = {host: data.draw(st.sampled_from(SHARES)) for host in present}
                for host in present:
                    folders[host][iteration] = saved
                everything.append(saved)
                recorded.append(iteration)
            case "another run":
                host, other = data.draw(st.sampled_from(HOSTS)), data.draw(st.integers(1, 9))
                strange = Lineage((Branch(f"x{number}", FRESH),))
                folders[host][other] = Saved(other, strange, f"m{number}", is_current=False, held={host: PIECES})
            case "damage":
                for saved in folders[data.draw(st.sampled_from(HOSTS))].values():
                    saved.held = {host: held - {data.draw(st.integers(0, 2))} for host, held in saved.held.items()}
            case "start":
                present = data.draw(st.sets(st.sampled_from(HOSTS), min_size=1))
                back_to = data.draw(st.none() | st.integers(1, max(1, iteration)))
                there = [folders[host] for host in sorted(present)]
                expected = max(
                    (
                        saved
                        for folder in there
                        for saved in folder.values()
                        if saved.is_current and back_to in (None, saved.iteration) and is_whole(saved, folders, present)
                    ),
                    key=lambda saved: saved.iteration,
                    default=None,
                )
                surveyed = [
                    {n: folders[h][n].parts(h) for n in folders[h] if lineage.admits(folders[h][n].lineage, n)}
                    for h in sorted(present)
                ]
                listed = candidates(surveyed)
                chosen = next((c for c in listed if not c.together.missing and back_to in (None, c.iteration)), None)
                assert (chosen and chosen.together.manifest) == (expected and expected.manifest)
                if chosen is None:
                    continue
                iteration = chosen.iteration
                known = max([*recorded, *(candidate.iteration for candidate in listed)])
                lineage = lineage.after_start(Branch(f"b{number}", iteration), newest_known=known)
                recorded = [known for known in recorded if known <= iteration]
                for saved in everything:
                    saved.is_current = saved.is_current and saved.iteration <= iteration


def is_whole(saved: Saved, folders: dict[int, dict[int, Saved]], present: set[int]) -> bool:
    """Return whether the hosts that are there hold every part."""
    there = [host for host in saved.held if host in present and folders[host].get(saved.iteration) is saved]
    return frozenset().union(*(saved.held[host] for host in there)) == PIECES
