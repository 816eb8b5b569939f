"""A loop of one's own, killed at random and started again, has the bits of an unbroken one, in a few lines."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from tests import ROOT
from tests.resume import torch_save_loop
from tests.resume.killed_loop import Loop, kill_at_random

FORKED = Loop("whole_loop", ("fork",))
SPAWNED = Loop("whole_loop", ("spawn",), whole=FORKED.arguments)  # seconds an epoch, where forked ones take none
ACCELERATED = Loop("accelerate_loop", ranks=2)
SLOW = {"spawned workers": SPAWNED, "two ranks of accelerate": ACCELERATED}
LOOPS = {"forked workers": FORKED, **SLOW}


def require(loop: Loop) -> None:
    if loop is ACCELERATED and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")


def test_a_killed_loop_with_workers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert kill_at_random(FORKED, tmp_path, kills=3, iterations=14).kills == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("spawned workers", marks=pytest.mark.nightly), "two ranks of accelerate"]
)
def test_other_killed_loops_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    require(SLOW[name])
    assert kill_at_random(SLOW[name], tmp_path, kills=3, iterations=14).kills == 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_fifty_kills_lose_no_bit(tmp_path: Path, name: str) -> None:
    require(LOOPS[name])
    tally = kill_at_random(LOOPS[name], tmp_path, kills=50, iterations=90, seed=1)
    print(name, tally)
    assert tally.kills == 50
    assert tally.in_saves


def code(path: Path) -> list[str]:
    """Return the lines of a program without its docstring and indentation."""
    return [line.strip() for line in path.read_text().splitlines()[1:] if line.strip()]


def test_saving_costs_fewer_lines_than_torch_save() -> None:
    ours = code(ROOT / "examples" / "whole_loop.py")
    others = code(Path(torch_save_loop.__file__))
    changes = [line[0] for line in difflib.ndiff(ours, others)]
    assert changes.count("-") == 5
    assert changes.count("+") >= 12


@pytest.mark.parametrize("has_generator", [False, True])
def test_a_loader_without_a_generator_draws_from_torch(has_generator: bool) -> None:
    generator = torch.Generator() if has_generator else None
    loader = DataLoader(list(range(4)), generator=generator)
    before = torch.get_rng_state()
    iter(loader)
    assert torch.equal(torch.get_rng_state(), before) is has_generator


class Noise(Dataset[float]):
    """Draws a number for each sample, from the generator of its worker or from one that the sample seeds."""

    def __init__(self, *, is_seeded: bool) -> None:
        self.is_seeded = is_seeded

    def __len__(self) -> int:
        return 4

    def __getitem__(self, sample: int) -> float:
        generator = torch.Generator().manual_seed(sample) if self.is_seeded else None
        return torch.rand(1, generator=generator).item()


@pytest.mark.parametrize("is_seeded", [False, True])
def test_draws_in_workers_begin_anew_unless_seeded_by_the_sample(is_seeded: bool) -> None:
    def draws(first: int) -> list[float]:
        samples = Subset(Noise(is_seeded=is_seeded), range(first, 4))
        generator = torch.Generator().manual_seed(0)
        return [batch.item() for batch in DataLoader(samples, num_workers=1, generator=generator)]

    assert (draws(first=2) == draws(first=0)[2:]) is is_seeded
