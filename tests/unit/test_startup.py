"""Checking a configuration waits for no library that only training needs, and a run for none that others need."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

import trainer.__main__
from tests import ROOT
from tests.harness import DEADLINE_S, TINY

HEAVY = {"torch", "numpy", "tokenizers", "xxhash", "tensorboard", "matplotlib", "transformers", "safetensors"}
# What the library is installed without, or beside.
APPLICATION = {"configs", "google", "hydra", "models", "omegaconf", "tqdm", "trainer"}

_COMPOSE = """
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import trainer.config.compose
from trainer.config.options import CONFIGS
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
    "words",
    [
        "--help",
        "train --help",
        "compare-loss --help",
        "publish --help",
        *(pytest.param(f"{name} --help", marks=pytest.mark.slow) for name in ("compare-speed", "compare-steps")),
    ],
)
def test_a_command_without_tensors_starts_without_torch(words: str) -> None:
    imported = imports_of("-m", "reprise", *words.split())
    of_columns = {"numpy", "xxhash"} if words.startswith("compare") else set()  # what every comparison needs
    assert {name.split(".")[0] for name in imported} & HEAVY <= of_columns


def test_the_library_waits_for_torch_until_it_is_used() -> None:
    imported = imports_of("-c", "import reprise")
    assert "reprise" in imported
    assert {name.split(".")[0] for name in imported} & (HEAVY | APPLICATION) == set()


def test_the_whole_library_imports_little_besides_torch() -> None:
    every_name = "import torch; import reprise; [getattr(reprise, name) for name in reprise.__all__]"
    imported = imports_of("-c", every_name) - imports_of("-c", "import torch")
    assert "xxhash" in imported
    assert {name.split(".")[0] for name in imported} & (HEAVY - {"numpy", "xxhash"} | APPLICATION) == set()
    assert imported & {"numpy.testing", "numpy.ma"} == set()


_INSPECT = """
import sys
import reprise.management.gathering, reprise.stores.mirror
from reprise.stores import mirror_run
from trainer.commands.checkpoint import main

run, copies = sys.argv[1:]
assert main(["ls", run]) == main(["show", run]) == main(["verify", run]) == main(["copy", run, copies]) == 0
assert main(["prune", run, "--optimizer", "--before", "7"]) == main(["prune", run, "--keep", "1"]) == 0
print(*sys.modules)
"""


def test_checkpoints_are_inspected_and_uploaded_without_torch(tmp_path: Path) -> None:
    """Torch would be half of the time of a listing, and nearly all of the memory of the process that uploads."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/golden/format1/iter_0000007", run / "iter_0000007")
    imported = modules_of(_INSPECT, str(run), str(tmp_path / "copies"))
    assert {"reprise.management.pruning", "reprise.management.verification"} <= imported
    assert {name.split(".")[0] for name in imported} & (HEAVY - {"numpy", "xxhash"}) == set()


# Each takes 0.2 s or more, and is for other runs: compiled ones, those of several ranks, those of a text tokenizer.
OF_OTHER_RUNS = {
    "matplotlib",
    "sympy",
    "tensorboard",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "reprise.api",
    "reprise.local.local_checkpointer",
    "transformers",
}


_TRAIN = """
import sys
from trainer.__main__ import main

main(sys.argv[1:])
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_run_on_one_rank_imports_nothing_of_other_runs(tmp_path: Path) -> None:
    overrides = [
        *TINY,
        "model.dropout=0.1",
        "parallel.invariant_ranks=2",
        "train.exit_interval=1",
        f"run.dir={tmp_path}",
    ]
    imported = modules_of(_TRAIN, "model=gpt2_tiny", *overrides)
    assert "trainer.training.loop" in imported
    assert imported & OF_OTHER_RUNS == set()


def test_the_command_line_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own command composes it twice, the first time to know its mode: 70 ms of each start."""
    calls = []
    compose = Hydra.compose_config

    def counted(*arguments: Any, **options: Any) -> DictConfig:
        calls.append(options["overrides"])
        return compose(*arguments, **options)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    monkeypatch.setattr(sys, "argv", ["reprise train", "train.dry_run=true", "model=gpt2_tiny"])
    assert trainer.__main__.main() == 0
    assert calls == [["train.dry_run=true", "model=gpt2_tiny"]]


def modules_of(program: str, *arguments: str) -> set[str]:
    """Return the modules of a program that ends with a line of their names."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return set(ended.stdout.splitlines()[-1].split())


def imports_of(*command: str) -> set[str]:
    """Return the modules that a call of Python imports."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return {line.split("|")[-1].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
