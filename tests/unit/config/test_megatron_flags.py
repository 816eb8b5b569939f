"""A command line with Megatron-LM's flags is answered with the keys."""

from __future__ import annotations

import sys

import pytest

from trainer.config.compose import compose_command
from trainer.config.megatron_flags import FLAGS
from trainer.config.options import keys
from trainer.errors import ConfigError


def test_flags_are_answered_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--save", "x", "--load=y", "--bf16", "--no-load-rng", "--train-iters", "7", "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", ["reprise train", *words])
    with pytest.raises(ConfigError) as refusal:
        compose_command()
    for line in (
        "--save: checkpoint.save=x",
        "--load: checkpoint.load=y",
        "--bf16: set train.dtype",
        "--no-load-rng: has no counterpart",
        "--train-iters: train.train_iters=7",
    ):
        assert line in str(refusal.value)


def test_every_key_of_the_table_exists() -> None:
    assert {key for named in FLAGS.values() for key in named.split()} <= set(keys())
