"""A command line with Megatron-LM's flags is answered with the keys."""

from __future__ import annotations

import sys

import pytest

from reprise.errors import ConfigError
from trainer.config.compose import compose, compose_command
from trainer.config.megatron_flags import FLAGS, refuse_flags
from trainer.config.options import keys


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


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--save", "a, b=c"], "checkpoint.save='a, b=c'"),
        (["--load=模型"], "checkpoint.load='模型'"),
        (["--save", "12"], "checkpoint.save='12'"),
        (["--save-interval", "10"], "checkpoint.save_interval=10"),
        (["--save_interval", "10"], "checkpoint.save_interval=10"),
        (["--max_checkpoint_keep=4"], "checkpoint.max_checkpoint_keep=4"),
        (["--max-checkpoint-keep", "4"], "checkpoint.max_checkpoint_keep=4"),
    ],
)
def test_an_answer_can_be_given_as_an_override(words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_flags(words)
    assert f": {answer}\n" in str(refusal.value)
    key, _, value = answer.partition("=")
    section, _, name = key.partition(".")
    assert str(getattr(getattr(compose([answer]), section), name)) == value.strip("'")


def test_every_flag_has_an_answer_in_one_message() -> None:
    flags = ["--save", "--save_interval", "--max_checkpoint_keep", "--no_save_optim", "--load"]
    with pytest.raises(ConfigError) as refusal:
        refuse_flags([word for flag in flags for word in (flag, "5")])
    assert [line for line in str(refusal.value).splitlines() if line.startswith("  --")] == [
        f"  {flag}: checkpoint.{flag[2:]}={value}"
        for flag, value in zip(flags, ["'5'", "5", "5", "5", "'5'"], strict=True)
    ]


def test_a_hydra_flag_and_a_shared_name_are_no_keys() -> None:
    refuse_flags(["--run", "--name", "a", "--dropout=0.1"])


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["--save-intervall", "5"], "checkpoint.save_interval=VALUE"),
        (["model=gpt2_tiny", "--train-itters=7"], "train.train_iters=7"),
        (["--ema-decays", "0.9"], "train.ema_decay=VALUE"),
    ],
)
def test_a_misspelled_flag_is_answered_with_the_key(
    monkeypatch: pytest.MonkeyPatch, words: list[str], suggestion: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["reprise train", *words])
    with pytest.raises(
        ConfigError, match=f"found {words[-1] if '=' in words[-1] else words[0]}. Did you mean {suggestion}"
    ):
        compose_command()


def test_every_key_of_the_table_exists() -> None:
    assert {key for named in FLAGS.values() for key in named.split()} <= set(keys())
