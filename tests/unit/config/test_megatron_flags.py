"""A command line with Megatron-LM's flags is answered with the keys."""

from __future__ import annotations

import pytest

from reprise.errors import ConfigError
from tests.messages import refused
from trainer.config.compose import compose, read_command
from trainer.config.megatron_flags import flags, refuse_flags
from trainer.config.schema import key_types


def test_flags_are_answered_with_their_keys() -> None:
    words = "--save x --load=y --bf16 --no-load-rng --train-iters 7 --no_save_optim 5 --max-checkpoint-keep=4 --cfg job"
    keys = ("checkpoint.save=x", "checkpoint.load=y", "train.dtype", "--no-load-rng: ", "train.train_iters=7")
    with refused(ConfigError, *keys, "checkpoint.no_save_optim=5", "checkpoint.max_checkpoint_keep=4"):
        read_command(words.split())


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--save", "a, b=c"], "save", "a, b=c"),
        (["--load=模型"], "load", "模型"),
        (["--save", "12"], "save", "12"),
        (["--save-interval", "10"], "save_interval", "10"),
        (["--save_interval", "10"], "save_interval", "10"),
    ],
)
def test_an_answer_can_be_given_as_an_override(words: list[str], key: str, value: str) -> None:
    answer = f"checkpoint.{key}={value}"
    with refused(ConfigError, f": {answer}\n"):
        refuse_flags(words)
    assert str(getattr(compose([answer]).checkpoint, key)) == value


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("--save-intervall 5", "checkpoint.save_interval=5"),
        ("model=gpt2_tiny --train-itters=7", "train.train_iters=7"),
        ("--ema_decays", "train.ema_decay=VALUE"),
    ],
)
def test_a_misspelled_flag_is_answered_with_the_key(words: str, suggestion: str) -> None:
    with refused(ConfigError, suggestion):
        read_command(words.split())


def test_every_key_of_the_table_exists() -> None:
    assert {key for named in flags().values() for key in named} <= key_types().keys()
