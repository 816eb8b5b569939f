"""A run is filled from a source, and never changed after it is built."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from reprise.channel import single_rank_channel
from tests.harness import built
from tests.unit.start.test_decide import cluster_of, config_in, trained
from trainer.run.build import Run
from trainer.start.decide import decide
from trainer.start.fill import fill

ABSENT = ("trainer.start.source.Fitting", "trainer.start.source.Fit.of", "trainer.run.state.finish_move")


def test_a_run_takes_no_assignment(tmp_path: Path) -> None:
    run = built(config_in(tmp_path / "run"), cluster_of(single_rank_channel()))
    with run.saves:
        for field in fields(Run):
            with pytest.raises(FrozenInstanceError):
                setattr(run, field.name, None)


def test_the_schedule_of_a_checkpoint_is_in_the_filled_run_alone(tmp_path: Path) -> None:
    folder = trained(tmp_path / "other", "optimizer.lr=0.5")
    overrides = (f"checkpoint.load={folder}", "checkpoint.use_checkpoint_scheduler=true", "train.train_iters=4")
    run = built(config_in(tmp_path / "run", *overrides), cluster_of(single_rank_channel()))
    with run.saves:
        schedule, description, config = run.schedule, dict(run.description), dict(run.saved_config)
        result = fill(run, decide(run.config, run.cluster, run.saves))
    assert (run.schedule, run.description, run.saved_config) == (schedule, description, config)
    assert result.schedule.lr == 0.5 != schedule.lr
    assert result.description["schedule"]["lr"] == 0.5
    assert result.saved_config["config"]["optimizer"]["lr"] == 0.5
    assert result.state.progress.iteration == 2
    assert "run" in result.description.keys() - description.keys()


@pytest.mark.parametrize("averages", [False, True])
def test_a_resume_enters_neither_fits_nor_averages_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averages: bool
) -> None:
    settings = ("schedule.lr_decay_iters=2", *(["train.ema_decay=0.9"] if averages else []))
    trained(tmp_path / "run", *settings)
    run = built(config_in(tmp_path / "run", *settings), cluster_of(single_rank_channel()))
    entered = list[str]()
    for name in ABSENT:
        monkeypatch.setattr(name, lambda *_, name=name: entered.append(name))
    with run.saves:
        assert fill(run, decide(run.config, run.cluster, run.saves)).state.progress.iteration == 2
    assert {*entered} == ({ABSENT[2]} if averages else set())
