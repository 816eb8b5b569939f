"""Starts that are killed before they save: a plain start begins afresh too.

Of `checkpoint.load=none` over an older run, before it trains; of a new run, after iterations.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import trainer.__main__
import trainer.start.fill
from reprise.folder import iteration_name
from tests.crash.killing import AFTER, BEFORE, Killer
from tests.harness import TINY, around_iterations, call_on_ranks, curve, launch, run_ok, tensor_files
from trainer.run.build import Run

ITERATIONS = (1, 2)
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=2",
    "schedule.lr_warmup_iters=1",
    "checkpoint.save_interval=1",
    "checkpoint.async_save=false",
)
FRESH = (*BASE, "train.seed=7")
ONE_SAVE = ("model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save_interval=3")
LOCAL = ("checkpoint.save=null", "checkpoint.local.save_interval=1", "checkpoint.local.keep=4")


def main(arguments: list[str]) -> None:
    """Run the trainer's command; it dies at a call from the record of the new branch to the first iteration."""
    told = json.loads(arguments[0])
    run = Path(told["run"])
    killer = Killer(run, notes=run.with_name("notes"), at=told["at"], when=told["when"])
    killer.install()
    note = trainer.start.fill.note_lineage
    window: list[int] = []

    def noted(*arguments: object, **keywords: object) -> Run:
        window.append(len(killer.calls))
        return note(*arguments, **keywords)  # type: ignore[arg-type]

    def begins(_: Run, iteration: int) -> None:
        if iteration == 1:
            run.with_name("window").write_text(json.dumps([*window, len(killer.calls)]))

    trainer.start.fill.note_lineage = noted
    around_iterations(before=begins)
    sys.argv = ["trainer", f"run.dir={run}", *arguments[1:]]
    trainer.__main__.main()


def start(run: Path, overrides: tuple[str, ...], *, at: int | None = None, when: str = BEFORE) -> tuple[int, ...]:
    told = json.dumps({"run": str(run), "at": at, "when": when})
    return call_on_ranks(main, [told, *overrides], folder=run, ranks=1).statuses


def kill_at(folder: Path, where: tuple[str, ...], count: int | None) -> None:
    """Kill a start over a run of two iterations at `count` calls, or at every call, and start it again without a word.

    Args:
        where: the overrides that name the folder of checkpoints, all below `folder / "run"`.
    """
    unbroken, template, run = folder / "unbroken", folder / "template", folder / "run"
    run_ok(unbroken, [*FRESH, "checkpoint.save_interval=2"])
    run_ok(run, [*BASE, *where])
    shutil.copytree(run, template)
    older = {path.name: tensor_files(path) for path in run.rglob("iter_*")}
    assert len(older) == len(ITERATIONS)
    fresh = (*FRESH, *where, "checkpoint.load=none")
    assert start(run, fresh) == (0,)
    first, end = json.loads((folder / "window").read_text())
    assert end - first > 20
    cases = [(at, when) for at in range(first, end) for when in (BEFORE, AFTER)]
    step = 1 if count is None else len(cases) // count
    for at, when in cases[step // 2 :: step]:
        shutil.rmtree(run)
        shutil.copytree(template, run)
        assert start(run, fresh, at=at, when=when) == (-9,)
        is_changed = (run / "run.json").read_bytes() != (template / "run.json").read_bytes()
        again = run_ok(run, [*FRESH, *where, *(() if is_changed else ["checkpoint.load=none"])])
        assert "starting fresh" in again.text
        assert curve(run) == curve(unbroken), (at, when)
        assert tensor_files(next(run.rglob(iteration_name(2)))) == tensor_files(next(unbroken.rglob(iteration_name(2))))
        if "checkpoint.save=null" not in where:  # what a host gives up is deleted with its next save
            assert {path.name.split(".")[0]: tensor_files(path) for path in run.rglob("*.superseded-1")} == older
        assert [path.name for path in (run / "checkpoints").rglob(".*")] == []


def test_a_killed_fresh_start_begins_again(tmp_path: Path) -> None:
    kill_at(tmp_path, (), 3)


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
        LOCAL,
        ("checkpoint.save_weights_interval=1",),
        ("train.micro_batch_size=auto", "train.max_micro_batch_size=2"),
    ],
    ids=["shared", "local", "weights", "auto"],
)
def test_a_run_killed_before_its_first_save_begins_again(tmp_path: Path, where: tuple[str, ...]) -> None:
    overrides = [*ONE_SAVE, *where, *([f"checkpoint.local.dir={tmp_path}/host"] if where == LOCAL else [])]
    overrides = [text.replace("local.save_interval=1", "local.save_interval=3") for text in overrides]
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    run_ok(unbroken, ONE_SAVE)
    assert launch(run, overrides, kill_after=2).statuses == (-9,)
    assert [row[0] for row in curve(run)] == [1, 2]
    again = run_ok(run, overrides)
    assert "the run ended at iteration 2, before its first save: it begins again" in again.text
    assert curve(run) == curve(unbroken)
    saved = next(path for folder in (run / "checkpoints", tmp_path / "host") for path in folder.glob(iteration_name(4)))
    assert tensor_files(saved) == tensor_files(unbroken / "checkpoints" / iteration_name(4))
    aside = (run / "metrics.abandoned-1.jsonl").read_text().splitlines()
    assert [row["iteration"] for row in map(json.loads, aside) if "loss" in row] == [1, 2]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ([], ["train.seed=7"], "found there train.seed=1234. Repeat that command"),
        (["checkpoint.load={base}", "checkpoint.finetune=true"], [], "found there checkpoint.load={base}. Repeat that"),
        (["checkpoint.save=null"], [], "but no checkpoint is there"),
    ],
    ids=["seed", "begun elsewhere", "no saves"],
)
def test_another_command_does_not_begin_the_run_again(
    tmp_path: Path, first: list[str], then: list[str], message: str
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    run_ok(base, [*ONE_SAVE, "train.exit_interval=1"])
    assert launch(run, [*ONE_SAVE, *(text.format(base=base) for text in first)], kill_after=2).statuses == (-9,)
    lines = (run / "metrics.jsonl").read_bytes()
    ended = launch(run, [*ONE_SAVE, *then])
    assert ended.statuses == (1,)
    assert "This run has recorded iterations but" in ended.text
    assert message.format(base=base) in ended.text
    assert "start over with checkpoint.load=none" in ended.text
    assert (run / "metrics.jsonl").read_bytes() == lines


def test_what_a_fresh_start_has_saved_is_not_given_up(tmp_path: Path) -> None:
    """Its checkpoints are lost: only a command that says so begins again, as after a run's first start."""
    run = tmp_path / "run"
    run_ok(run, [*BASE, "train.exit_interval=1"])
    run_ok(run, [*FRESH, "checkpoint.load=none"])
    for number in ITERATIONS:
        shutil.rmtree(run / "checkpoints" / iteration_name(number))
    ended = launch(run, FRESH)
    assert ended.statuses == (1,)
    assert "start over with checkpoint.load=none" in ended.text
    assert [path.name for path in run.rglob("iter_*")] == ["iter_0000001.superseded-1"]
