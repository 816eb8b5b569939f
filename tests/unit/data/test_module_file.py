"""Samples of a user's object: the windows and the order of token files, masks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reprise.errors import ConfigError, DataError
from reprise.storage import FILE_SYSTEM
from tests.harness import TINY, compose, curve, launch, run_ok
from tests.messages import Printed, refused
from tests.resume.random_tokens import LENGTH, random_tokens, write_random_tokens
from trainer.commands import evaluate
from trainer.config.checks import validate
from trainer.config.load_saved import find_saved
from trainer.data.documents import IGNORED, WindowForm
from trainer.data.module_file import ModuleFile

NAME = "tests.unit.data.test_module_file"
RUN = (
    "model=gpt2_tiny",
    *TINY,
    "train.threads=1",
    "train.train_iters=8",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "parallel.invariant_ranks=2",
    "checkpoint.save_interval=2",
    "checkpoint.reshard=true",
)
MODULE = ("data=module", f"data.factory={NAME}:windows", "data.train=a", "data.valid=b")


class Windows:
    """The samples of a token file; tests of refusals change what it returns."""

    def __init__(self, tokens: np.ndarray[Any, Any]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return (self._tokens.size - 1) // LENGTH

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[number * LENGTH : (number + 1) * LENGTH + 1])


def windows(path: str) -> tuple[Windows, str]:
    return Windows(random_tokens()[path]), path


def others(path: str) -> tuple[Windows, str]:
    return Windows(random_tokens()[path]), f"{path}, second edition"


def alone(path: str) -> Windows:
    return Windows(random_tokens()[path])


def iterable(path: str) -> tuple[object, str]:
    return iter(Windows(random_tokens()[path])), path  # type: ignore[call-overload]


def test_a_killed_run_has_the_curve_of_token_files(tmp_path: Path, capsys: Printed) -> None:
    write_random_tokens(tmp_path)
    files = [f"data.train={tmp_path / 'a.bin'}", f"data.valid={tmp_path / 'b.bin'}"]
    run_ok(tmp_path / "files", [*RUN, "data=token_file", *files])
    run = tmp_path / "run"
    launch(run, [*RUN, *MODULE], ranks=2, kill_after=5, saved=4)
    run_ok(run, [*RUN, *MODULE])
    assert curve(run) == curve(tmp_path / "files")
    saved = find_saved(run, iteration=None, save=None, files=FILE_SYSTEM)
    assert saved is not None
    assert "data.factory" not in saved.values  # a checkpoint names no code to run
    assert evaluate.main([str(run)]) == 2
    assert "data.factory=null" in capsys.readouterr().err
    assert evaluate.main([str(run), "--set", f"data.factory={NAME}:windows"]) == 0
    more = [f"run.dir={run}", *RUN, *MODULE, "train.train_iters=9", f"data.factory={NAME}:others"]
    ended = launch(run, more)
    assert not ended.ok
    assert "checkpoint.override_data" in ended.text


def test_a_mask_takes_targets_and_leaves_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ([5, 6, 7, 8], [1, 1, 0, 1])
    monkeypatch.setattr(Windows, "__getitem__", lambda *_: row)
    inputs = WindowForm(is_padded=True).split(torch.from_numpy(opened("windows").read(0, LENGTH + 1))[None])
    assert inputs.tokens[0, :4].tolist() == [5, 6, 7, 8]
    assert inputs.targets[0].tolist() == [6, IGNORED, 8, *[IGNORED] * (LENGTH - 3)]


def opened(name: str, module: str = NAME) -> ModuleFile:
    return ModuleFile(Path("a"), factory=f"{module}:{name}", seq_length=LENGTH, vocab_size=257)


def test_a_factory_of_anything_else_is_refused() -> None:
    for name, module, word in (
        ("windows", "no_such_module", "PYTHONPATH"),
        ("missing", NAME, "missing"),
        ("alone", NAME, "__getitem__"),
        ("iterable", NAME, "iterator and str"),
    ):
        with refused(DataError, f"data.factory={module}:{name}", word):
            opened(name, module)


def test_a_sample_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [[1], [1] * (LENGTH + 2), [1, 257], [-1, 1], [1.0, 2.0], [[1, 2]]]
    for item in [*rows, ([1, 2], [1]), ([1, 2, 3], [1, 0, 0])]:
        monkeypatch.setattr(Windows, "__getitem__", lambda *_, item=item: item)
        with refused(DataError, "sample 3 of a", "train.seq_length"):
            opened("windows").read(3 * LENGTH, 4 * LENGTH + 1)


def test_keys_of_another_kind_are_refused() -> None:
    for word in ("data.factory=null", "data.document_mask=true", "data=token_file"):
        with refused(ConfigError, "data.document_mask" if "mask" in word else "data.factory"):
            validate(compose([*TINY, *MODULE, word]), 1)
