"""Ranks that tests launch are configured as their command line says, whoever composed it."""

from __future__ import annotations

import hydra
import pytest

from tests.composed import answer_with, composed
from tests.harness import TINY
from trainer.config.compose import compose

COMMAND = ["trainer", "run.dir=/tmp/run-1/x", *TINY, "optimizer=muon", "checkpoint.local.dir=/dev/shm/x"]


def test_a_configuration_is_that_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, config = compose(COMMAND[1:]), composed(COMMAND)
    assert config is not None
    monkeypatch.setattr(hydra, "compose", hydra.compose)
    answer_with(config, COMMAND)
    assert hydra.compose("train", overrides=COMMAND[1:]) == config  # for which Hydra needs its folder
    assert compose(COMMAND[1:]) == expected
    assert compose(COMMAND[1:-1]) != expected


@pytest.mark.parametrize(
    "command",
    [
        "follow run.dir=/tmp/x",
        "trainer run.dir=/tmp/x run.dir=/tmp/y",
        "trainer no.such.key=/tmp/x",
        "trainer train.train_itres=3",
    ],
)
def test_a_wrong_command_is_left_to_the_ranks(command: str) -> None:
    assert composed(command.split()) is None
