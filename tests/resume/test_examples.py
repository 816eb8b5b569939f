"""The programs in `examples/`: killed at random and run again, each has the figures and files of an unbroken run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from tests import ROOT
from tests.resume.killed_loop import Loop, kill_at_random

EXAMPLES = ROOT / "examples"
FORKED = Loop("whole_loop", ("fork",))
GATE = {"plain_loop": Loop("plain_loop"), "whole_loop": FORKED}
SLOW = {
    "pipeline": Loop("pipeline", ranks=2),
    "nested_state": Loop("nested_state"),
    "fsdp2": Loop("fsdp2", ranks=2),
    "ddp_batchnorm": Loop("ddp_batchnorm", ranks=2),
    "hf_trainer": Loop("hf_trainer"),
    "accelerate_loop": Loop("accelerate_loop", ranks=2),
}
# Spawned workers take seconds an epoch, where forked ones take none.
NIGHTLY = {"spawned workers": Loop("whole_loop", ("spawn",), whole=FORKED.arguments)}
NEED_ACCELERATE = ("hf_trainer", "accelerate_loop")
OF_ENGINES = ("corpus", "datasets_samples", "fabric_loop", "ray_train")  # which tests/engines/ runs
ITERATIONS = 12


def check(loop: Loop, folder: Path, *, kills: int, iterations: int = ITERATIONS) -> int:
    """Kill a loop at random, and return how many of the kills came within a save."""
    if loop.name in NEED_ACCELERATE and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed, which the Trainer of transformers needs too")
    tally = kill_at_random(loop, folder, kills=kills, iterations=iterations)
    assert tally.kills == kills
    return tally.in_saves


@pytest.mark.parametrize("name", GATE)
def test_an_example_resumes_bitwise(tmp_path: Path, name: str) -> None:
    check(GATE[name], tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SLOW, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_a_further_example_resumes_bitwise(tmp_path: Path, name: str) -> None:
    check({**SLOW, **NIGHTLY}[name], tmp_path, kills=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["whole_loop", "spawned workers", "accelerate_loop"])
def test_fifty_kills_lose_no_bit(tmp_path: Path, name: str) -> None:
    assert check({**GATE, **SLOW, **NIGHTLY}[name], tmp_path, kills=50, iterations=90)


def test_every_example_is_short_listed_and_tested() -> None:
    programs = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert programs.keys() == {*GATE, *SLOW, *OF_ENGINES}
    listed = (EXAMPLES / "README.md").read_text()
    for name, text in programs.items():
        assert len(text.splitlines()) < 60, name
        assert f"[{name}.py]({name}.py)" in listed


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
    """What docs/library.md says of torch's own loaders."""

    def draws(first: int) -> list[float]:
        samples = Subset(Noise(is_seeded=is_seeded), range(first, 4))
        generator = torch.Generator().manual_seed(0)
        before = torch.get_rng_state()
        values = [batch.item() for batch in DataLoader(samples, num_workers=1, generator=generator)]
        assert torch.equal(torch.get_rng_state(), before)  # a loader without a generator draws from torch
        return values

    assert (draws(first=2) == draws(first=0)[2:]) is is_seeded
