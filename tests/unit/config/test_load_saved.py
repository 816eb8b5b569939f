"""The command that a refusal advises names the run, whatever its name is."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from reprise.reading import Checkpoint
from trainer.config.compose import compose
from trainer.config.load_saved import own_command
from trainer.config.run import RunSection
from trainer.config.saved import RUN_CONFIG


@pytest.mark.parametrize("name", ["plain", "a,b", "1e3", "1_000", "a b", 'it\'s="a"', "${x}", "训练 一"])
@pytest.mark.parametrize("parent", ["runs", "/disk, two"])
def test_the_advised_command_names_the_run(name: str, parent: str) -> None:
    folder = Path(parent, name)
    manifest = SimpleNamespace(files={RUN_CONFIG: None})
    path = folder / "checkpoints" / "iter_0000001"
    checkpoint = cast(Checkpoint, SimpleNamespace(path=path, manifest=manifest, state={}))

    advice = own_command(checkpoint, RunSection(name, str(folder)))

    words = shlex.split(advice.split("`")[1].replace("train_iters=N", "train_iters=1"))
    config = compose(words[2:])
    assert config.checkpoint.load == str(folder)
    assert config.run.dir == str(folder)
