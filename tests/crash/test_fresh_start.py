"""Starts that are killed before they save: a plain start begins afresh too.

Of `checkpoint.load=none` over an older run, before it trains; of a new run, after iterations.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.storage import iteration_name
from tests.crash.killing import AFTER, BEFORE, trained_until_killed
from tests.crash.outcomes import rows
from tests.harness import TINY, checkpoint, curve, launch, run_ok, tensor_files
from tests.profiles import slow

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=2",
    "schedule.lr_warmup_iters=1",
    "checkpoint.save_interval=1",
    "checkpoint.async_save=false",
)
FRESH, NONE = (*BASE, "train.seed=7"), "checkpoint.load=none"
ONE_SAVE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=3")
LOCAL = ("checkpoint.save=null", "checkpoint.local.save_interval=1", "checkpoint.local.keep=4")


def kill_at(folder: Path, where: tuple[str, ...], count: int | None) -> None:
    """Kill a start over a run of two iterations at `count` calls, or at every call, and start it again without a word.

    Args:
        where: the overrides that name the folder of checkpoints, all below `folder / "run"`.
    """
    whole, template, run = folder / "whole", folder / "template", folder / "run"
    run_ok(whole, [*FRESH, "checkpoint.save_interval=2"])
    run_ok(run, [*BASE, *where])
    shutil.copytree(run, template)
    older = {path.name: tensor_files(path) for path in run.rglob("iter_*")}
    assert len(older) == 2
    fresh = (*FRESH, *where, NONE)
    assert trained_until_killed(run, fresh) == 0
    first, end = json.loads((folder / "window").read_text())
    assert end - first > 20
    cases = [(at, when) for at in range(first, end) for when in (BEFORE, AFTER)]
    step = 1 if count is None else len(cases) // count
    for at, when in cases[step // 2 :: step]:
        shutil.rmtree(run)
        shutil.copytree(template, run)
        assert trained_until_killed(run, fresh, at=at, when=when) == -9
        is_changed = (run / "run.json").read_bytes() != (template / "run.json").read_bytes()
        again = run_ok(run, [*FRESH, *where, *(() if is_changed else [NONE])])
        assert "starting fresh" in again.text
        assert curve(run) == curve(whole), (at, when)
        assert tensor_files(next(run.rglob(iteration_name(2)))) == tensor_files(checkpoint(whole, 2))
        if "checkpoint.save=null" not in where:  # what a host gives up is deleted with its next save
            assert {path.name.split(".")[0]: tensor_files(path) for path in run.rglob("*.superseded-1")} == older
        assert list((run / "checkpoints").rglob(".*")) == []


def test_a_killed_fresh_start_begins_again(tmp_path: Path) -> None:
    kill_at(tmp_path, (), 1)


@pytest.mark.slow
def test_a_killed_fresh_start_of_a_host_begins_again(tmp_path: Path) -> None:
    kill_at(tmp_path, (*LOCAL, f"checkpoint.local.dir={tmp_path}/run/checkpoints"), 3)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_at_every_call_of_a_fresh_start(tmp_path: Path) -> None:
    kill_at(tmp_path, (), None)


@pytest.mark.parametrize(
    "where",
    [
        (),
        slow(("checkpoint.save=null", "checkpoint.local.save_interval=3", "checkpoint.local.dir={}/host")),
        slow(("checkpoint.save_weights_interval=1",)),
        slow(("train.micro_batch_size=auto", "train.max_micro_batch_size=2")),
    ],
    ids=["shared", "local", "weights", "auto"],
)
def test_a_run_killed_before_its_first_save_begins_again(tmp_path: Path, where: tuple[str, ...]) -> None:
    overrides, whole, run = (
        [*ONE_SAVE, *(word.format(tmp_path) for word in where)],
        tmp_path / "whole",
        tmp_path / "run",
    )
    run_ok(whole, ONE_SAVE)
    assert launch(run, overrides, kill_after=2).statuses == (-9,)
    assert [row[0] for row in curve(run)] == [1, 2]
    again = run_ok(run, overrides)
    assert "saved nothing: it starts over" in again.text
    assert curve(run) == curve(whole)
    saved = next(path for folder in (run / "checkpoints", tmp_path / "host") for path in folder.glob(iteration_name(4)))
    assert tensor_files(saved) == tensor_files(checkpoint(whole, 4))
    aside = rows(run, None, name="metrics.abandoned-1.jsonl")
    assert [row["iteration"] for row in aside if "loss" in row] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([], ["train.seed=7"]),
        (["checkpoint.load={base}", "checkpoint.finetune=true"], []),
        (["checkpoint.save=null"], []),
    ],
    ids=["seed", "begun elsewhere", "no saves"],
)
def test_another_command_begins_the_run_again_too(tmp_path: Path, first: list[str], then: list[str]) -> None:
    base, whole, run = tmp_path / "base", tmp_path / "whole", tmp_path / "run"
    run_ok(base, [*ONE_SAVE, "train.exit_interval=1"])
    run_ok(whole, [*ONE_SAVE, *then])
    assert launch(run, [*ONE_SAVE, *(text.format(base=base) for text in first)], kill_after=2).statuses == (-9,)
    killed = curve(run)
    run_ok(run, [*ONE_SAVE, *then])
    assert curve(run) == curve(whole)
    aside = rows(run, None, name="metrics.abandoned-1.jsonl")
    assert [(row["iteration"], row["loss_hex"]) for row in aside if "loss" in row] == [row[:2] for row in killed]


@pytest.mark.slow
def test_what_a_fresh_start_has_saved_is_not_given_up(tmp_path: Path) -> None:
    """Its checkpoints are lost: only a command that says so begins again, as after a run's first start."""
    run_ok(tmp_path, [*BASE, "train.exit_interval=1"])
    run_ok(tmp_path, [*FRESH, NONE])
    for number in (1, 2):
        shutil.rmtree(checkpoint(tmp_path, number))
    ended = launch(tmp_path, FRESH)
    assert ended.statuses == (1,)
    assert NONE in ended.text
    assert [path.name for path in tmp_path.rglob("iter_*")] == ["iter_0000001.superseded-1"]
