"""Which checkpoints are of a run, and of the branch that it goes on along."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import CheckpointError
from reprise.format.lineage import FRESH, LINEAGE, Branch, Journal, Lineage, Parent, newest_lineage, saved_lineage
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


BRANCH = {"id": "a", "began_at": 0}


@pytest.mark.parametrize(
    "record",
    [
        5,
        {},
        {"branches": []},
        {"branches": {"id": "a"}},
        {"branches": [{"id": "a"}]},
        {"branches": [BRANCH | {"id": 7}]},
        {"branches": [BRANCH | {"began_at": -2}]},
        {"branches": [BRANCH | {"began_at": True}]},
        {"branches": [BRANCH], "parent": []},
        {"branches": [BRANCH], "launch": "a"},
        {"branches": [BRANCH], "launch": [7]},
        {"branches": [BRANCH], "parent": {"run": "b"}},
        {"branches": [BRANCH], "parent": {"run": "b", "iteration": -1}},
    ],
)
def test_a_malformed_record_is_refused(record: Json) -> None:
    with refused(CheckpointError):
        saved_lineage({LINEAGE: record}, where="state")


@dataclass(eq=False)
class Saved:
    """A checkpoint, and whether the run may still go on from it."""

    iteration: int
    lineage: Lineage
    is_current: bool = True


HOSTS = st.sets(st.integers(0, 2), min_size=1)


@examples(150)
@given(st.data())
def test_a_start_takes_the_newest_checkpoint_of_its_branch(data: st.DataObject) -> None:
    lineage, iteration, present = A, 0, data.draw(HOSTS)
    folders: list[dict[int, Saved]] = [{}, {}, {}]
    own, recorded = list[Saved](), list[int]()
    for number in range(data.draw(st.integers(1, 14))):
        match data.draw(st.sampled_from(["save", "save", "start", "start", "another run"])):
            case "save":
                iteration += 1
                own.append(Saved(iteration, lineage))
                recorded.append(iteration)
                for host in present:
                    folders[host][iteration] = own[-1]
            case "another run":
                strange = Saved(data.draw(st.integers(1, 9)), Lineage((Branch(f"x{number}", FRESH),)), is_current=False)
                folders[data.draw(st.integers(0, 2))][strange.iteration] = strange
            case "start":
                present = data.draw(HOSTS)
                there = {saved for host in present for saved in folders[host].values()}
                admitted = {saved for saved in there if lineage.admits(saved.lineage, saved.iteration)}
                assert admitted == {saved for saved in there if saved.is_current}
                known = {saved.iteration for saved in admitted}
                back_to = data.draw(st.sampled_from([max(known), *sorted(known)]) if known else st.none())
                if back_to is None:
                    continue
                newest = max([*recorded, *known])
                iteration, lineage = back_to, lineage.after_start(Branch(f"b{number}", back_to), newest_known=newest)
                recorded = [saved for saved in recorded if saved <= iteration]
                for saved in own:
                    saved.is_current &= saved.iteration <= iteration
