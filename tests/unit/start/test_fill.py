"""A run is filled from a source, and has its position, schedule and records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reprise.errors import MismatchError
from reprise.format import TensorKind
from reprise.ranks import single_rank_channel
from tests.harness import built, filled
from tests.messages import refused
from tests.unit.start.test_decide import cluster_of, config_in, trained
from trainer.run.build import Run

LINEAR = ("schedule.lr_decay_style=linear", "schedule.min_lr=0.0")


def resumed(folder: Path, *overrides: str) -> Run:
    """Resume a run of two iterations in this process, and return it before its third."""
    run = built(config_in(folder, "train.train_iters=6", *overrides), cluster_of(single_rank_channel()))
    with run.saves:
        return filled(run)


def test_a_finished_run_does_not_go_on_at_a_rate_of_zero(tmp_path: Path) -> None:
    trained(tmp_path / "run", *LINEAR)
    with refused(MismatchError, "schedule.lr_decay_iters=7 checkpoint.override_scheduler=true"):
        resumed(tmp_path / "run", *LINEAR, "schedule.lr_decay_iters=2")
    stretched = (*LINEAR, "schedule.lr_decay_iters=7", "checkpoint.override_scheduler=true")
    schedule = resumed(tmp_path / "run", *stretched).schedule
    assert min(schedule.at(iteration, 0) for iteration in range(3, 7)) > 0


def test_a_run_whose_own_command_ends_at_zero_resumes(tmp_path: Path) -> None:
    settings = (*LINEAR, "schedule.lr_decay_iters=1", "train.train_iters=6")
    trained(tmp_path / "run", *settings, "train.exit_interval=2")
    assert resumed(tmp_path / "run", *settings).state.progress.iteration == 2


@pytest.mark.parametrize(
    ("settings", "more", "line"),
    [
        pytest.param(
            ["schedule.lr_decay_iters=2"],
            [],
            "1.0000e-04 in iteration 3, 1.0000e-04 in iteration 6, where the schedule",
            marks=pytest.mark.slow,
        ),
        (["schedule.lr_decay_iters=4"], [], "3.2500e-04 in iteration 3, 1.0000e-04 in iteration 6, where the schedule"),
        (
            [*LINEAR],
            ["schedule.lr_decay_iters=6", "checkpoint.override_scheduler=true"],
            "6.0000e-04 in iteration 3, 0.0000e+00 in iteration 6",
        ),
    ],
    ids=["cosine at its floor", "cosine before its floor", "stretched"],
)
def test_an_extension_says_its_learning_rates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: list[str], more: list[str], line: str
) -> None:
    trained(tmp_path / "run", *settings, "schedule.lr_warmup_iters=1")
    caplog.clear()
    run = resumed(tmp_path / "run", *settings, *more)
    assert any(text.startswith(f"learning rate: {line}") for text in caplog.messages)
    first, last = (float(word) for word in line.split() if "e-" in word or "e+" in word)
    assert (run.schedule.at(3, 0), run.schedule.at(6, 0)) == pytest.approx((first, last), rel=1e-3)


def test_a_constant_rate_goes_on_without_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "run", "schedule.lr_decay_style=constant")
    caplog.clear()
    run = resumed(tmp_path / "run", "schedule.lr_decay_style=constant", "schedule.min_lr=0.0")
    assert run.schedule.at(6, 0) == 1e-3
    assert "schedule" not in caplog.text


def test_a_refused_resume_names_the_keys_that_one_sets(tmp_path: Path) -> None:
    trained(tmp_path / "run", "train.eval_interval=1")
    text = tmp_path / "text.txt"
    text.write_text("abc\n" * 5000)
    changed = ["optimizer.lr=0.1", "train.global_batch_size=24", "train.seed=7", "optimizer.adam_eps=1e-3"]
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path}"]
    with refused(MismatchError, str(tmp_path / "run/checkpoints/iter_0000002")) as caught:
        resumed(tmp_path / "run", *changed, *data)
    message = str(caught.value)
    keys = {word.partition("=")[0] for word in changed} | {"train.train_iters", "data.path"}
    assert set(re.findall(r"^  ([\w.]+) +saved ", message, re.M)) == keys
    assert re.search(rf"data\.path +saved stdlib \(\w+\)  current {text} \(\w+\)", message)
    assert re.search(r"train\.train_iters +saved 2  current 6  \(schedule\.lr_decay_iters=2 ", message)


@pytest.mark.parametrize("has_moments", [True, False])
def test_the_same_bits_are_promised_only_with_the_moments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_moments: bool
) -> None:
    invariant = ("parallel.invariant_ranks=1", "schedule.lr_decay_iters=6")
    trained(tmp_path / "run", *invariant, "parallel.zero_stage=0")
    allowed = ("checkpoint.reshard=true", f"checkpoint.no_load_optim={not has_moments}")
    resumed(tmp_path / "run", *invariant, "parallel.zero_stage=1", *allowed)
    assert ("so does the loss curve: same bits" in caplog.text) == has_moments


def test_an_older_checkpoint_leaves_no_moments_of_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", "schedule.lr_decay_iters=2")
    run = built(config_in(tmp_path / "run", "schedule.lr_decay_iters=2"), cluster_of(single_rank_channel()))
    moments = {t.spec.name: t for t in run.state.shards() if t.spec.kind is TensorKind.OPTIMIZER}
    frozen = next(name.removeprefix("exp_avg.") for name in moments if name.startswith("exp_avg."))
    is_left = {name: name.endswith(f".{frozen}") for name in moments}
    run.state.specs = tuple(spec for spec in run.state.specs if not is_left.get(spec.name))  # as without its moments
    monkeypatch.setattr("trainer.start.source.check_tensors", lambda *_, **__: None)  # which has all of them
    for tensor in moments.values():
        tensor.local.fill_(7.0)  # as the damaged one had them
    with run.saves:
        filled(run)
    assert {tensor.local.abs().max().item() for name, tensor in moments.items() if is_left[name]} == {0.0}
    assert all(tensor.local.abs().max().item() != 7.0 for tensor in moments.values())
