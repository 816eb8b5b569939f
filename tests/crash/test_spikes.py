"""A range of bad data: the run goes back, passes over it, and has the bits of a run that was told to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.crash import troubles
from tests.crash.outcomes import assert_ends_as, rows
from tests.harness import TINY, Ended, checkpoint, state_of
from tests.profiles import nightly, slow
from trainer.data.token_file import write_token_file

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "data=token_file",
    "model.vocab_size=257",
    "optimizer.lr=0.01",
    "train.train_iters=16",
    "schedule.lr_decay_iters=16",
    "checkpoint.save_interval=4",
    "train.on_spike=rewind",
    "train.spike_window=4",
    "train.spike_factor=2.5",
)
LAYOUTS = {"one rank": (1, []), "zero3": (2, ["parallel.zero_stage=3"]), "tp2": (2, ["parallel=tp2"])}
LAYOUTS["pp2"] = (2, ["parallel=pp2"])
# The samples of iteration 10 are bad. The checkpoint before it is that of iteration 8, after 96 samples.
BAD, TOLD = (108, 120), "train.skip_samples=[96-120]"
DEATH = {"name": "death", "iteration": 9, "nth": 2}  # which follows a rewind to iteration 8


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with a file of tokens that a model learns within a few iterations."""
    write_token_file(tmp_path / "easy.bin", [np.arange(100 * 16 + 1) % 5], dtype=np.uint16)
    return tmp_path


def train(
    run: Path, *overrides: str, bad: tuple[int, int] = BAD, layout: str = "one rank", dies: bool = False
) -> Ended:
    ranks, topology = LAYOUTS[layout]
    events = [{"name": "bad data", "first": bad[0], "end": bad[1]}, *([DEATH] if dies else [])]
    command = [f"data.train={run.parent}/easy.bin", *BASE, *topology, *overrides]
    return troubles.train(run, command, *events, ranks=ranks)


@pytest.mark.parametrize("layout", ["one rank", slow("zero3"), nightly("tp2"), nightly("pp2")])
def test_a_rewound_run_is_that_which_was_told_the_range(data: Path, layout: str) -> None:
    run, told = data / "run", data / "told"
    ended = train(run, "train.exit_interval=14", layout=layout)
    assert ended.ok, ended.text
    assert "rewound from iteration 10 to 8" in ended.outputs[0]
    assert train(run, layout=layout).ok
    assert train(told, TOLD, layout=layout).ok
    assert_ends_as(run, told)
    rewound, plain = (state_of(checkpoint(folder, 16)) for folder in (run, told))
    assert (rewound["spikes"].pop("rewound"), plain["spikes"].pop("rewound")) == ([[96, 120]], [])
    assert rewound == plain
    (rewind,) = rows(run, "spike", "rewind")
    aside = "metrics.abandoned-1.jsonl"
    expected = {"iteration": 8, "event": "rewind", "from": 10, "skipped": [96, 120], "abandoned": aside}
    assert rewind | expected == rewind
    aside_rows = rows(run, None, "spike", name=aside)
    assert [(row["iteration"], row.get("event")) for row in aside_rows] == [(9, None), (10, None), (10, "spike")]


@pytest.mark.slow
def test_a_killed_rewind_is_made_again_and_counts_once(data: Path) -> None:
    run, told, once = data / "run", data / "told", "train.max_rewinds=1"
    assert train(run, once, dies=True).statuses == (-9,)
    assert train(run, once).ok
    assert train(told, TOLD).ok
    assert_ends_as(run, told)
    assert state_of(checkpoint(run, 16))["spikes"]["rewound"] == [[96, 120]]
    assert [row["event"] for row in rows(run, "spike", "rewind")] == ["rewind", "rewind"]  # of both launches
    ended = train(run, once, "train.train_iters=20", bad=(180, 240))
    assert f"{once} rewinds, after 96-120" in ended.text


@pytest.mark.slow
def test_adapters_go_back_on_the_base_of_their_command(data: Path) -> None:
    assert train(data / "base", "train.on_spike=off", "train.train_iters=8", bad=(5000, 5001)).ok
    start = [f"checkpoint.load={checkpoint(data / 'base', 8)}", "checkpoint.finetune=true"]
    ended = train(data / "run", "model.lora.rank=4", "train.spike_factor=2.0", *start)
    assert ended.ok, ended.text
    assert "rewound from iteration 10 to 8" in ended.text


@pytest.mark.slow
def test_after_the_last_rewind_the_run_stops_with_the_ranges(data: Path) -> None:
    run = data / "run"
    ended = train(run, "train.max_rewinds=2", bad=(96, 1000))
    assert ended.statuses == (1,), ended.text
    assert "train.max_rewinds=2 rewinds, after 96-108, 96-120" in ended.text
    assert "96-132 to train.skip_samples" in ended.text
    assert [row["event"] for row in rows(run, "spike", "rewind")] == ["rewind", "rewind", "spike"]
    # The spike comes in the iteration after the save, which may be under way.
    assert [row["iteration"] for row in rows(run, "save")] == [4, 8]
    assert [path.name for path in sorted((run / "checkpoints").glob("iter_*"))] == ["iter_0000004", "iter_0000008"]


def test_a_warning_changes_nothing(data: Path) -> None:
    ended = train(data / "run", "train.on_spike=warn")
    assert ended.ok, ended.text
    assert "a spike: loss" in ended.text
    assert train(data / "off", "train.on_spike=off").ok
    assert_ends_as(data / "run", data / "off")
    assert "spikes" not in state_of(checkpoint(data / "off", 16))
