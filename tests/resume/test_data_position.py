"""Another source of data in the middle of a run: where it begins, and that a later resume goes on there."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

import trainer.__main__
from tests.harness import TINY, around_iterations, call_on_ranks, curve, launch, run_ok, state_of, tensor_files
from tests.resume.random_tokens import LENGTH, SIZES, random_tokens, write_random_tokens
from tests.sample_order import sample_ids
from trainer.run.build import Run

SEED = 1234
BASE = (
    *TINY,
    "model=gpt2_tiny",
    "data=token_file",
    "model.vocab_size=257",
    "train.global_batch_size=8",
    "train.batch_schedule=0:4 16:8",  # 4, 8, 12, 16, 24, 32, 40
    "schedule.lr_decay_iters=15",
    "schedule.lr_warmup_iters=1",
)
OTHER = "checkpoint.override_data=true"
START = "data.position=start"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_random_tokens(tmp_path)
    return tmp_path


def run_of(data: Path, name: str, iterations: int) -> list[str]:
    return [*BASE, f"data.train={data}/{name}.bin", f"train.train_iters={iterations}"]


def train_and_note_windows(arguments: list[str]) -> None:
    """Train, and write the windows of each iteration that this rank reads into a file."""

    def note(run: Run, iteration: int) -> None:
        progress = run.state.progress.consumed_samples
        size = run.batch_schedule.at(progress)
        batches = run.train_data.train_batch(progress, SEED, size)
        with Path(run.config.run.dir).with_name("windows").open("a") as file:
            print(json.dumps([iteration, [row for batch in batches for row in batch[:, :-1].tolist()]]), file=file)

    around_iterations(before=note)
    trainer.__main__.main([f"run.dir={arguments[0]}", *arguments[1:]])


def test_a_new_source_begins_at_its_start_once(data: Path) -> None:
    run = data / "run"
    phases = [("a", 3, []), ("b", 5, [OTHER, START]), ("b", 6, [START]), ("b", 7, [])]
    for name, iterations, more in phases:
        arguments = [str(run), *run_of(data, name, iterations), *more]
        ended = call_on_ranks(train_and_note_windows, arguments, folder=run, ranks=1)
        assert ended.ok, ended.text
        is_change = OTHER in more
        assert ("is new at sample 12 of the run and begins at its first sample" in ended.text) == is_change
    windows = [json.loads(line)[1] for line in (data / "windows").read_text().splitlines()]
    known = random_tokens()
    read = {"a": list(chain(*windows[:3])), "b": list(chain(*windows[3:]))}
    for name, rows in read.items():
        ids = sample_ids(0, len(rows), epoch_size=SIZES[name], seed=SEED).tolist()
        assert rows == [known[name][n * LENGTH : (n + 1) * LENGTH].tolist() for n in ids]
    assert [len(rows) for rows in read.values()] == [12, 4 + 3 * 8]
    run_ok(data / "whole", run_of(data, "a", 3))
    run_ok(data / "whole", [*run_of(data, "b", 7), OTHER, START])
    assert curve(run) == curve(data / "whole")
    last = "checkpoints/iter_0000007"
    assert tensor_files(run / last) == tensor_files(data / "whole" / last)
    assert state_of(run / last) == state_of(data / "whole" / last)


def test_a_new_source_goes_on_at_the_position_and_says_so(data: Path) -> None:
    run_ok(data / "run", run_of(data, "a", 3))
    refused = launch(data / "run", run_of(data, "c", 5))
    assert not refused.ok
    assert "data.position=start begins a new source at its first sample" in refused.text
    ended = run_ok(data / "run", [*run_of(data, "c", 5), OTHER])
    assert f"({data}/c.bin) is new at sample 12 of the run and begins at its sample 12 of 17 in epoch 1" in ended.text
    assert "data.position=start begins a new source at its first sample" in ended.text
    state = json.loads((data / "run/checkpoints/iter_0000005/trainer_state.json").read_text())
    assert "blend" not in state


def test_a_start_repeated_from_the_same_checkpoint_is_the_same(data: Path) -> None:
    """As after a death before the first save, or a rewind."""
    run_ok(data / "run", [*run_of(data, "a", 3), "checkpoint.max_checkpoint_keep=0"])
    curves = []
    for _ in range(2):
        run_ok(data / "run", [*run_of(data, "b", 4), OTHER, START, "checkpoint.ckpt_step=3"])
        curves.append(curve(data / "run"))
    assert curves[0] == curves[1]


def test_skipped_samples_are_passed_over_once(data: Path) -> None:
    run = data / "run"
    phases = [(3, ["2-5", "14-18"]), (5, ["14-18", "20-25", "40-41"]), (6, []), (7, ["3-4", "50-52"])]
    texts = []
    for iterations, ranges in phases:
        skips = f"train.skip_samples=[{','.join(ranges)}]"
        arguments = [str(run), *run_of(data, "a", iterations), skips]
        ended = call_on_ranks(train_and_note_windows, arguments, folder=run, ranks=1)
        assert ended.ok, ended.text
        texts.append("\n".join(line for line in ended.text.splitlines() if "train.skip_samples:" in line))
    windows = [json.loads(line)[1] for line in (data / "windows").read_text().splitlines()]
    passed = {2, 3, 4, 14, 15, 16, 17, 20, 21, 22, 23, 24, 50, 51}
    taken = [position for position in range(100) if position not in passed][:40]
    assert [len(rows) for rows in windows] == [4, 4, 4, 4, 8, 8, 8]
    ids = [int(sample_ids(position, 1, epoch_size=SIZES["a"], seed=SEED)[0]) for position in taken]
    assert list(chain(*windows)) == [random_tokens()["a"][n * LENGTH : (n + 1) * LENGTH].tolist() for n in ids]
    assert texts == [
        "",
        "train.skip_samples: from position 19 on 20-25, 40-41 is passed over, before it was none",
        "train.skip_samples: from position 36 on none is passed over, before it was 40-41",
        "train.skip_samples: from position 44 on 50-52 is passed over, before it was none",
    ]
    arguments = [str(run), *run_of(data, "b", 8), OTHER, START, "train.skip_samples=[56-58]"]
    ended = call_on_ranks(train_and_note_windows, arguments, folder=run, ranks=1)
    assert "is new at sample 54 of the run and begins at its first sample" in ended.text
    ids = [int(sample_ids(n, 1, epoch_size=SIZES["b"], seed=SEED)[0]) for n in (0, 1, *range(4, 10))]
    rows = json.loads((data / "windows").read_text().splitlines()[-1])[1]
    assert rows == [random_tokens()["b"][n * LENGTH : (n + 1) * LENGTH].tolist() for n in ids]
    state = json.loads((run / "checkpoints/iter_0000007/trainer_state.json").read_text())
    assert (state["consumed_samples"], state["skipped"]) == (40, [[2, 5], [14, 18], [20, 25], [50, 52]])
