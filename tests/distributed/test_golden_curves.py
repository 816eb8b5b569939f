"""Short runs have the bits that they had when `tests/golden/curves.json` was measured.

`python -m tests.golden.curves` measures them anew, for another version of torch or for a change that is meant to change
the bits of a run. A change that is not must leave the file as it is.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.golden import curves

GOLDEN: dict[str, Any] = json.loads(curves.CURVES.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the curves of this source on this machine."""
    if str(torch.__version__) != GOLDEN["torch"]:
        pytest.skip(f"the golden curves are those of torch {GOLDEN['torch']}, this is {torch.__version__}")
    target = tmp_path_factory.mktemp("curves") / "curves.json"
    curves.measure(target)
    found: dict[str, Any] = json.loads(target.read_text())
    expected = GOLDEN["operations"]
    if others := [name for name in expected if found["operations"].get(name) != expected[name]]:
        pytest.skip(f"this machine's libraries compute other bits in {', '.join(others)}, without the trainer")
    return found


@pytest.mark.parametrize("name", GOLDEN["runs"])
def test_a_run_has_the_golden_bits(measured: dict[str, Any], name: str) -> None:
    assert measured["runs"][name] == GOLDEN["runs"][name]


def test_the_golden_curves_are_those_of_the_script() -> None:
    assert list(GOLDEN["runs"]) == list(curves.RUNS)
    for run in GOLDEN["runs"].values():
        assert [len(run[key]) for key in ("loss", "grad_norm")] == [curves.ITERATIONS] * 2
        assert len(run["valid_loss"]) == 2
        assert sum(name.startswith("model") for name in run["files"]) == 1
        assert sum(name.startswith("optimizer/") for name in run["files"]) == 1


def test_each_rounding_has_a_golden_curve_of_its_own() -> None:
    losses = {name: tuple(run["loss"]) for name, run in GOLDEN["runs"].items()}
    for family in ("gpt2", "llama3"):
        assert losses[f"{family}, 1 rank"] != losses[f"{family}, 2 ranks, zero 0"]
    dropout, plain = losses["gpt2, 1 rank, dropout"], losses["gpt2, 1 rank"]
    assert dropout != plain
    assert losses["gpt2, 1 rank, bfloat16"] != plain
