"""A run on a blend: its samples on any number of ranks, its record, and another blend on resume."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import TrainerError
from tests.harness import TINY, call_on_ranks, curve, run_ok
from tests.messages import refused
from tests.resume.random_tokens import SEED, SIZES, state, train_and_note_windows, windows_read
from tests.resume.starts import start
from tests.sample_order import sample_ids
from trainer.commands import checkpoint as look

BASE = (
    *TINY,
    "model=gpt2_tiny",
    "data=token_file",
    "model.vocab_size=257",
    "schedule.lr_decay_iters=15",
    "schedule.lr_warmup_iters=1",
)


def blend(folder: Path, **weights: object) -> str:
    entries = ", ".join(f"{{path: {folder}/{name}.bin, weight: {weight}}}" for name, weight in weights.items())
    return f"data.train=[{entries}]"


def test_other_weights_and_ranks_repeat_no_sample(data: Path) -> None:
    phases = [
        (1, blend(data, a=0.7, b=0.3)),
        (3, blend(data, a=0.5, b=0.25, c=0.25)),
        (2, blend(data, c="2/3", a="1/3")),
        (1, f"data.train={data}/b.bin"),
    ]
    run = data / "run"
    allow = ["checkpoint.override_data=true", "checkpoint.reshard=true"]
    for number, (ranks, train) in enumerate(phases, 1):
        arguments = [str(run), *BASE, train, f"train.train_iters={3 * number}", *allow]
        ended = call_on_ranks(train_and_note_windows, arguments, folder=run, ranks=ranks)
        assert ended.ok, ended.text
    read = defaultdict(list)
    for _, name, sample in windows_read(data):
        read[name].append(sample)
    # 36 samples a phase, each source on its own from one phase to the next.
    expected = {"a": 25.2 + 18 + 12, "b": 10.8 + 9 + 36, "c": 9 + 24}
    assert sum(map(len, read.values())) == 144
    for name, size in SIZES.items():
        assert abs(len(read[name]) - expected[name]) <= 3
        assert read[name] == sample_ids(0, len(read[name]), epoch_size=size, seed=SEED).tolist()
    record: Any = state(run, 12)["blend"]
    assert record["position"] == sum(record["consumed"].values()) == 108
    assert len(record["consumed"]) == 3


def test_a_stopped_blend_resumes_bitwise(data: Path) -> None:
    weights = blend(data, a=0.6, b=0.4)
    run_ok(data / "whole", [*BASE, weights, "train.train_iters=4"])
    run_ok(data / "run", [*BASE, weights, "train.train_iters=2"])
    with refused(TrainerError, "checkpoint.override_data=true", "saved 3/5  current 1/2"):
        start(data / "run", *BASE, blend(data, a=0.5, b=0.5), "train.train_iters=4")
    run_ok(data / "run", [*BASE, blend(data, b=2, a=3), "train.train_iters=4"])  # the same shares
    assert curve(data / "run") == curve(data / "whole")
    saved: Any = state(data / "run", 4)
    assert "blend" not in saved
    assert sorted(saved["data"]["weights"].values()) == ["2/5", "3/5"]


@pytest.mark.slow
def test_a_new_run_from_its_weights_begins_every_source_again(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growing = ["train.batch_schedule=0:4 8:12", "train.train_samples=32"]
    base = [override for override in BASE if not override.startswith("schedule")]
    run_ok(data / "run", [*base, *growing, blend(data, a=0.6, b=0.4)])
    changed = [*base, *growing, blend(data, a=0.5, c=0.5), "checkpoint.override_data=true"]
    run_ok(data / "run", [*changed, "train.train_samples=44", "schedule.lr_decay_samples=32"])
    run_ok(data / "fine", [*changed, f"checkpoint.load={data}/run", "checkpoint.finetune=true"])
    assert [row[4] for row in curve(data / "fine")] == [4, 8, 20, 32]
    assert "blend" not in state(data / "fine", 4)
    assert look.main(["show", str(data / "run")]) == 0
    shown = dict(re.findall(r"^(\S+) +(\S.*?) *$", capsys.readouterr().out, flags=re.M))
    assert shown["batch.batch_schedule"] == "0:4 8:12"
    assert shown["blend.position"] == "32"
    assert sum(int(count) for name, count in shown.items() if name.startswith("blend.consumed.")) == 32
    assert [share for name, share in shown.items() if name.startswith("data.weights.")] == ["1/2", "1/2"]


def test_two_copies_of_a_source_are_refused(data: Path) -> None:
    (data / "d.bin").write_bytes((data / "a.bin").read_bytes())
    with refused(TrainerError, "a.bin", "d.bin"):
        start(data / "run", *BASE, blend(data, a=0.6, b=0.4, d=1), "train.train_iters=1")


@pytest.mark.slow
def test_texts_are_blended_and_held_out_too(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text of {name}. " * 300)
    entries = ", ".join(f"{{path: {tmp_path}/{name}.txt, weight: {n}}}" for n, name in enumerate("ab", 1))
    options = ["data=text", f"data.train=[{entries}]", f"data.cache={tmp_path}/cache", "train.eval_interval=1"]
    run_ok(tmp_path / "run", [*TINY, "model=gpt2_tiny", *options, "train.train_iters=3", "train.eval_iters=1"])
    assert len(curve(tmp_path / "run")) == 3


@pytest.mark.slow
def test_validation_data_of_a_list_are_read_in_order(data: Path) -> None:
    losses = []
    for name in "bc":
        (data / f"{name}.bin").rename(data / f"held_{name}.bin")
    for name, valid in {"list": f"[{data}/held_b.bin,{data}/held_c.bin]", "glob": f"{data}/held_?.bin"}.items():
        options = [*BASE, f"data.train={data}/a.bin", f"data.valid={valid}", "train.eval_interval=1"]
        run_ok(data / name, [*options, "train.train_iters=1", "train.eval_iters=4"])
        losses.append(state(data / name, 1)["valid_loss"])
    assert losses[0] == losses[1]
