"""The programs in `examples/`: killed at random and run again, each has the figures and files of an unbroken run."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from tests import ROOT
from tests.harness import call_on_ranks, started, tensor_files
from tests.profiles import nightly
from tests.resume.killed_loop import TIMEOUT_S, Loop, figures, kill, kill_at_random, run_main, unbroken

EXAMPLES = ROOT / "examples"
FORKED = Loop("whole_loop", ("fork",))
GATE = {"plain_loop": Loop("plain_loop"), "whole_loop": FORKED}
SLOW = {
    "pipeline": Loop("pipeline", ranks=2),
    "nested_state": Loop("nested_state"),
    "fsdp2": Loop("fsdp2", ranks=2),
    "ddp_batchnorm": Loop("ddp_batchnorm", ranks=2),
    "hf_trainer": Loop("hf_trainer", ranks=2),
    "accelerate_loop": Loop("accelerate_loop", ranks=2),
    "torchtitan_parts": Loop("torchtitan_parts", ranks=2),
}
# Spawned workers take seconds an epoch, where forked ones take none.
NIGHTLY = {"spawned workers": Loop("whole_loop", ("spawn",), whole=FORKED.arguments)}
NEEDS = {"hf_trainer": "accelerate", "accelerate_loop": "accelerate", "torchtitan_parts": "torchtitan"}
# tests/engines/ runs these.
OF_ENGINES = ("corpus", "datasets_samples", "fabric_loop", "lightning_trainer", "ray_train")
ITERATIONS = 12


def _require(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed, which this program needs: see `make test-engines`")


def check(loop: Loop, folder: Path, *, kills: int, iterations: int = ITERATIONS) -> int:
    """Kill a loop at random, and return how many of the kills came within a save."""
    _require(loop.name)
    tally = kill_at_random(loop, folder, kills=kills, iterations=iterations)
    assert tally.kills == kills
    return tally.in_saves


@pytest.mark.parametrize("name", GATE)
def test_an_example_resumes_bitwise(tmp_path: Path, name: str) -> None:
    check(GATE[name], tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SLOW, *map(nightly, NIGHTLY)])
def test_a_further_example_resumes_bitwise(tmp_path: Path, name: str) -> None:
    check({**SLOW, **NIGHTLY}[name], tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_loop", nightly("hf_trainer"), nightly("torchtitan_parts")])
def test_a_killed_example_goes_on_with_half_of_its_ranks(tmp_path: Path, name: str) -> None:
    _require(name)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = unbroken(Loop(name, ranks=2), whole, ITERATIONS)
    arguments = [name, str(killed), str(ITERATIONS)]
    with started(run_main, arguments, folder=killed, ranks=2) as running:
        assert kill(running, random.Random(1), [], lines=5)
    begun = max(map(int, (path.name[5:] for path in killed.glob("iter_*"))), default=0)
    ended = call_on_ranks(run_main, arguments, folder=killed, ranks=1, timeout_s=TIMEOUT_S)
    assert ended.ok, ended.text
    printed, weights = (
        {number: figure.split()[0] for number, figure in each.items()}
        for each in (figures(ended.outputs[0]), expected[0])
    )
    assert begun
    assert min(printed) == begun + 1
    assert printed.items() <= weights.items()  # the second figure is drawn
    ends = [tensor_files(folder / f"iter_{ITERATIONS:07d}") for folder in (killed, whole)]
    weights_and_moments = [{name: end[name] for name in end if not name.startswith("extra/")} for end in ends]
    assert weights_and_moments[0] == weights_and_moments[1]  # apart from the random state of each rank


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
