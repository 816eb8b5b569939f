"""`reprise options` describes keys, sections and prefixes from the schema."""

from __future__ import annotations

import pytest

from tests.messages import Printed
from trainer.commands.options import main
from trainer.config.schema import key_types


def test_all_keys_are_described(capsys: Printed) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "model= one of gpt2_124m, " in printed
    assert not [key for key in key_types() if "." in key and f"\n{key} (" not in printed]


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("train.seed=5", "train.seed (integer; default 1234)", 0),
        ("schedule", "schedule= one of constant, cosine, linear, wsd", 5),
        ("checkpoint.local", "checkpoint.local (the keys below; default below)", 5),
        ("train.exit_", "train.exit_interval (integer; default 0)", 1),
    ],
)
def test_a_name_selects_keys(name: str, first: str, others: int, capsys: Printed) -> None:
    assert main([name]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines[0].startswith(first)
    assert len(lines) > others
    assert others or len(lines) == 1


def test_an_unknown_name_is_refused_with_the_closest(capsys: Printed) -> None:
    assert main(["train.train_iter5"]) == 2
    assert "did you mean train.train_iters?" in capsys.readouterr().err
