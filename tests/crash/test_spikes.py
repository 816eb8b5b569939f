"""A range of bad data: the run goes back, passes over it, and has the bits of a run that was told to."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.__main__
import trainer.training.loop
from tests.harness import TINY, Ended, call_on_ranks, curve, state_of, tensor_files
from tests.positions import methods_with
from trainer.data.batches import Samples
from trainer.data.look_ahead import Ints
from trainer.data.token_file import write_token_file
from trainer.run import saves

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
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "zero3": (2, ["parallel.zero_stage=3"]),
    "tp2": (2, ["parallel=tp2"]),
    "pp2": (2, ["parallel=pp2"]),
}


def train_on_bad_data(arguments: list[str]) -> None:
    """Run the trainer's command; the samples at a range of positions are noise, and saves are slow.

    No save is finished before the run waits for it.
    """
    first, end = map(int, arguments[0].split("-"))

    def with_noise(windows: Ints, positions: Ints) -> Ints:
        is_bad = (first <= positions) & (positions < end)
        noise = (positions[:, None] * 7919 + np.arange(windows.shape[1]) ** 3 * 104729) % 257
        return np.where(is_bad[:, None], noise, windows)

    checkpointer: Any = vars(saves)["Checkpointer"]
    save, wait, reports = checkpointer.save, checkpointer.wait, checkpointer.reports
    has_waited = False

    def saving(saver: Any, *arguments: Any) -> Any:
        nonlocal has_waited
        report = save(saver, *arguments)
        has_waited = False
        return report

    def waiting(saver: Any) -> None:
        nonlocal has_waited
        wait(saver)
        has_waited = True

    def late(saver: Any) -> list[Any]:
        return reports(saver) if has_waited else []

    for name, method in methods_with(with_noise).items():
        setattr(Samples, name, method)
    checkpointer.save, checkpointer.wait, checkpointer.reports = saving, waiting, late
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def train_on_bad_data_and_die(arguments: list[str]) -> None:
    """The same, killed after the second time that iteration 9 is trained, which follows a rewind to iteration 8."""
    iterate, numbers = trainer.training.loop.iterate, list[int]()

    def dying(run: Any) -> Any:
        result = iterate(run)
        numbers.append(run.state.progress.iteration)
        if numbers.count(9) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.training.loop.iterate = dying
    train_on_bad_data(arguments)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with a file of tokens that a model learns within a few iterations."""
    write_token_file(tmp_path / "easy.bin", [np.arange(100 * 16 + 1) % 5], dtype=np.uint16)
    return tmp_path


def train(data: Path, run: str, bad: str, *overrides: str, layout: str = "one rank") -> Ended:
    ranks, topology = LAYOUTS[layout]
    places = [bad, f"run.dir={data / run}", f"data.train={data}/easy.bin"]
    return call_on_ranks(train_on_bad_data, [*places, *BASE, *topology, *overrides], folder=data / run, ranks=ranks)


def events(
    run: Path, name: str = "metrics.jsonl", *, kinds: tuple[str, ...] = ("spike", "rewind")
) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [row for row in rows if row.get("event") in kinds]


@pytest.mark.parametrize(
    "layout",
    [
        "one rank",
        pytest.param("zero3", marks=pytest.mark.slow),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.nightly]) for name in ("tp2", "pp2")),
    ],
)
def test_a_rewound_run_is_that_which_was_told_the_range(data: Path, layout: str) -> None:
    run, told = data / "run", data / "told"
    # The samples of iteration 10 are bad. The checkpoint before it is that of iteration 8, after 96 samples.
    ended = train(data, "run", "108-120", "train.exit_interval=14", layout=layout)
    assert ended.ok, ended.text
    assert "rewound from iteration 10 to 8" in ended.outputs[0]
    assert train(data, "run", "108-120", layout=layout).ok
    assert train(data, "told", "108-120", "train.skip_samples=[96-120]", layout=layout).ok
    assert curve(run) == curve(told)
    last = "checkpoints/iter_0000016"
    assert tensor_files(run / last) == tensor_files(told / last)
    rewound, plain = state_of(run / last), state_of(told / last)
    assert rewound["spikes"].pop("rewound") == [[96, 120]]
    assert plain["spikes"].pop("rewound") == []
    assert rewound == plain
    (rewind,) = events(run)
    named = {
        "iteration": 8,
        "event": "rewind",
        "from": 10,
        "skipped": [96, 120],
        "abandoned": "metrics.abandoned-1.jsonl",
    }
    assert rewind | named == rewind
    (spike,) = events(run, rewind["abandoned"])
    assert (spike["iteration"], spike["event"]) == (10, "spike")
    assert [row["iteration"] for row in map(json.loads, (run / rewind["abandoned"]).read_text().splitlines())] == [
        9, 10, 10,
    ]  # fmt: skip


def test_a_killed_rewind_goes_on_and_counts(data: Path) -> None:
    places = ["108-120", f"run.dir={data / 'run'}", f"data.train={data}/easy.bin", *BASE, "train.max_rewinds=1"]
    killed = call_on_ranks(train_on_bad_data_and_die, places, folder=data / "run", ranks=1)
    assert killed.statuses == (-9,), killed.text
    assert train(data, "run", "108-120", "train.max_rewinds=1").ok
    assert train(data, "told", "108-120", "train.skip_samples=[96-120]").ok
    assert curve(data / "run") == curve(data / "told")
    last = "checkpoints/iter_0000016"
    assert tensor_files(data / "run" / last) == tensor_files(data / "told" / last)
    assert state_of(data / "run" / last)["spikes"]["rewound"] == [[96, 120]]
    assert [row["event"] for row in events(data / "run")] == ["rewind"]
    ended = train(data, "run", "180-240", "train.max_rewinds=1", "train.train_iters=20")
    assert "at most train.max_rewinds=1 rewinds, after 96-120" in ended.text


def test_after_the_last_rewind_the_run_stops_with_the_ranges(data: Path) -> None:
    ended = train(data, "run", "96-1000", "train.max_rewinds=2")
    assert ended.statuses == (1,), ended.text
    assert "at most train.max_rewinds=2 rewinds, after 96-108, 96-120" in ended.text
    assert "add the range 96-132 to train.skip_samples" in ended.text
    assert sorted(path.name for path in (data / "run/checkpoints").glob("iter_*")) == ["iter_0000004", "iter_0000008"]
    assert [row["event"] for row in events(data / "run")] == ["rewind", "rewind", "spike"]
    # The spike comes in the iteration after the save, which may be under way.
    assert [row["iteration"] for row in events(data / "run", kinds=("save",))] == [4, 8]


def test_a_warning_changes_nothing(data: Path) -> None:
    ended = train(data, "run", "108-120", "train.on_spike=warn")
    assert ended.ok, ended.text
    assert "a spike: loss" in ended.text
    assert train(data, "off", "108-120", "train.on_spike=off").ok
    assert curve(data / "run") == curve(data / "off")
    assert "spikes" not in state_of(data / "off/checkpoints/iter_0000016")
