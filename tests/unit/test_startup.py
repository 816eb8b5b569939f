"""Reading and checking a configuration waits for no library that only training needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

HEAVY = {"torch", "numpy", "tokenizers", "xxhash", "tensorboard", "matplotlib", "transformers", "safetensors"}

_COMPOSE = """
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from trainer.__main__ import CONFIGS
from trainer.config.checks import validate

with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    validate(OmegaConf.to_object(compose("train", ["model=gpt2_124m"])), 1)
"""


@pytest.mark.parametrize(
    "command",
    [("-m", "trainer", "--help"), ("-c", "import trainer.config.schema"), ("-c", _COMPOSE)],
    ids=["help", "schema", "compose and check"],
)
def test_a_configuration_needs_no_heavy_library(command: tuple[str, ...]) -> None:
    imported = imports_of(*command)
    assert "trainer.config.schema" in imported
    assert {name.split(".")[0] for name in imported} & HEAVY == set()


@pytest.mark.parametrize(
    "words", ["--help", "--version", "train --help", "compare-loss --help", "compare-speed --help"]
)
def test_a_command_without_tensors_starts_without_torch(words: str) -> None:
    imported = imports_of("-m", "trainer.commands.main", *words.split())
    assert {name.split(".")[0] for name in imported} & HEAVY == set()


def imports_of(*command: str) -> set[str]:
    """Return the modules that a call of Python imports."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {line.split("|")[-1].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
