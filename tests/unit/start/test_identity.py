"""Which run the local checkpoints of hosts belong to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reprise.errors import MismatchError
from reprise.format import FRESH, Branch, Lineage
from tests.messages import refused
from trainer.start.identity import choose_lineage

A = Lineage((Branch("a", FRESH),))
REWOUND = Lineage((*A.branches, Branch("b", 4)))
ASIDE = Lineage((*A.branches, Branch("c", 2)))
OTHER = Lineage((Branch("x", FRESH),))
NEW = Lineage()


def choose(*hosts: tuple[Lineage, Lineage | None], shared: Lineage = NEW) -> Lineage:
    """Return the lineage that hosts with these folders of the run, and of local checkpoints, agree on."""
    named = {f"host{number}": lineages for number, lineages in enumerate(hosts)}
    return choose_lineage(shared, named, where="/local")


def test_the_longest_lineage_of_any_host_is_the_current_one() -> None:
    assert choose((A, A), (NEW, REWOUND)) == REWOUND
    assert choose((REWOUND, REWOUND), (NEW, A)) == REWOUND
    assert choose((A, None), (NEW, None), shared=REWOUND) == REWOUND


def test_a_run_is_known_by_shared_checkpoints_or_another_host() -> None:
    assert choose((NEW, None), shared=A) == A
    assert choose((NEW, A), (A, A)) == A
    assert choose((NEW, None), (NEW, None)) == NEW


@pytest.mark.parametrize(("run", "shared"), [(NEW, NEW), (A, NEW), (NEW, A)])
def test_the_hosts_of_another_run_are_named(run: Lineage, shared: Lineage) -> None:
    with refused(MismatchError, "host1", "run x"):
        choose((run, None), (NEW, OTHER), shared=shared)


def test_checkpoints_of_several_runs_are_refused() -> None:
    with refused(MismatchError, "/local"):
        choose((NEW, A), (NEW, OTHER))
    with refused(MismatchError, "/local"):
        choose((A, OTHER))


def test_checkpoints_that_name_no_run_are_refused() -> None:
    for run in (NEW, A):
        with refused(MismatchError, "/local"):
            choose((run, NEW))


def test_two_branches_of_as_many_rewinds_are_refused() -> None:
    with refused(MismatchError, "host1"):
        choose((REWOUND, REWOUND), (NEW, ASIDE))
    assert choose((A, replace(A, launch=("b",)))) == A  # a launch makes no branch
