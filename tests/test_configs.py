"""Every shipped configuration composes and can run; what cannot run is refused before anything is built."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import trainer.config.compose  # noqa: F401 (registers the schema)
import trainer.config.options as command
from models.families import parameter_count
from reprise.saving import SavePolicy
from tests.harness import DEADLINE_S
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import validate
from trainer.config.run import RunSection
from trainer.config.schema import Config
from trainer.parallel.topology import Topology
from trainer.schedules.lr import resolve

GROUPS = {
    group: sorted(path.stem for path in (command.CONFIGS / group).glob("*.yaml"))
    for group in sorted(path.name for path in command.CONFIGS.iterdir() if path.is_dir())
}
# What a choice leaves to the user, on 8 ranks.
NEEDED = {
    "experiment=demo": ["parallel.invariant_ranks=8"],
    "data=text": ["data.path=book.txt"],
    "data=token_file": ["data.train=train.bin"],
    "data=megatron": ["data.train=prefix"],
    "data=module": ["data.factory=package:make", "data.train=samples"],
}
# llm.c and transformers for the published ones; the small ones by hand: tables, blocks, last norm.
SIZES = {
    "gpt2_tiny": 257 * 128 + 256 * 128 + 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128,
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "llama3_tiny": 2 * 257 * 128 + 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 352 + 2 * 128) + 128,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_405b": 405_853_388_800,
    "qwen3_tiny": 257 * 128 + 4 * (2 * 4 * 48 * 128 + 2 * 2 * 48 * 128 + 3 * 128 * 352 + 2 * 128 + 2 * 48) + 128,
    "qwen3_0.6b": 596_049_920,
}


@pytest.fixture(autouse=True, scope="module")
def _search_path() -> Iterator[None]:
    with initialize_config_dir(str(command.CONFIGS), version_base="1.3"):
        yield


def composed(*overrides: str) -> Config:
    config = OmegaConf.to_object(compose("train", overrides=list(overrides)))
    assert isinstance(config, Config)
    return config


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(command.CONFIGS.parent), "OMP_NUM_THREADS": "1"}
    process = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(process, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("choice", [f"{group}={name}" for group, names in GROUPS.items() for name in names])
def test_every_choice_of_every_group_composes_and_can_run(choice: str) -> None:
    batches = ["train.global_batch_size=16", "train.micro_batch_size=1"]
    validate(composed(choice, *batches, *NEEDED.get(choice, [])), world_size=8)


# Every experiment and the ranks that it is for.
WORLD_SIZES = {
    "demo": 1,
    "gpt2_124m_tp2_pp2_dp2": 8,
    "llama3_1b_tp2_sp": 2,
    "llama3_8b_tp8_zero3": 16,
    "reference_3d": 8,
    "reference_gpt2": 1,
    "reference_llama3": 1,
}


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_can_run_on_the_ranks_it_is_for(experiment: str) -> None:
    config = composed(f"experiment={experiment}")
    validate(config, WORLD_SIZES[experiment])
    lines = (command.CONFIGS / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    if experiment != "demo":  # launched by `make demo`
        (launch,) = [line for line in lines if line.startswith("#") and f" -m trainer experiment={experiment} " in line]
        counts = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", launch)
        assert launch.startswith("# torchrun " if counts else "# python ")
        assert math.prod(map(int, counts)) == WORLD_SIZES[experiment]


@pytest.mark.parametrize(
    ("words", "ranks", "model", "topology"),
    [
        (["experiment=gpt2_124m_tp2_pp2_dp2"], 8, "gpt2_124m", Topology(pp=2, dp=2, tp=2, sp=True)),
        (["experiment=llama3_1b_tp2_sp"], 2, "llama3_1b", Topology(pp=1, dp=1, tp=2, sp=True)),
        (["experiment=llama3_8b_tp8_zero3"], 16, "llama3_8b", Topology(pp=1, dp=2, tp=8)),
        (["experiment=reference_3d"], 8, "gpt2_tiny", Topology(pp=2, dp=2, tp=2, vpp=2, sp=True)),
        (["experiment=llama3_1b_tp2_sp", "model=llama3_tiny", "parallel=zero2"], 2, "llama3_tiny", Topology(1, 2, 1)),
    ],
)
def test_an_experiment_s_name_gives_its_model_and_topology(
    words: list[str], ranks: int, model: str, topology: Topology
) -> None:
    config = composed(*words)
    if "reference" not in words[0]:
        assert parameter_count(config.model) == SIZES[model]
    assert config.parallel.topology(ranks) == topology
    zero_stages = {"experiment=llama3_8b_tp8_zero3": 3, "parallel=zero2": 2}
    if words[-1] in zero_stages:
        assert config.parallel.zero_stage == zero_stages[words[-1]]


def test_the_default_is_small_and_saves_into_the_run_s_folder() -> None:
    config = composed()
    validate(config, world_size=1)
    assert parameter_count(config.model) == SIZES["gpt2_tiny"]
    assert config.checkpoint.save == "runs/default/checkpoints"
    assert composed("run.name=a").checkpoint.save == "runs/a/checkpoints"
    assert composed("checkpoint.save=null").checkpoint.save is None


@pytest.mark.parametrize("schedule", GROUPS["schedule"])
def test_the_default_warm_up_fits_every_length(schedule: str) -> None:
    config = composed(f"schedule={schedule}")
    for train_iters, warmup in {1: 0, 2: 1, 5: 2, 9: 4, 10: 10, 50: 10, 10**6: 10}.items():
        config.train.train_iters = train_iters
        validate(config, world_size=1)
        resolved = config.learning_rates
        assert (resolved.warmup, resolved.decay) == (warmup, train_iters)
    config.train.train_iters, config.schedule.lr_decay_iters = 5, 100
    validate(config, world_size=1)
    assert resolve(config.schedule, config.train.length, 1e-3).warmup == 10


def test_every_model_has_its_known_size() -> None:
    assert set(GROUPS["model"]) == set(SIZES)
    assert {name: parameter_count(composed(f"model={name}").model) for name in SIZES} == SIZES


def test_a_configuration_without_overrides_has_schema_defaults() -> None:
    config, run = composed(), RunSection(dir="runs/default")
    section = CheckpointSection(save="runs/default/checkpoints")
    assert config == Config(model=config.model, run=run, checkpoint=section)


# Presets of a size or a topology say all of it; an experiment says what it is.
WHOLE = {"experiment", "model", "parallel"}


@pytest.mark.parametrize("group", sorted(set(GROUPS) - WHOLE))
def test_a_group_file_holds_only_values_other_than_the_defaults(group: str) -> None:
    defaults = OmegaConf.to_container(OmegaConf.structured(Config(model=composed().model)), enum_to_str=True)
    assert isinstance(defaults, dict)
    for path in sorted((command.CONFIGS / group).glob("*.yaml")):
        values = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(values, dict)
        assert {key for key, value in values.items() if defaults[group][key] == value} == set(), path


def test_the_library_s_save_defaults_are_the_configuration_s() -> None:
    """One differs: a call of the library returns when the checkpoint is there."""
    policy, section = SavePolicy(Path()), CheckpointSection()
    shared = {field.name for field in fields(SavePolicy)} & {field.name for field in fields(CheckpointSection)}
    values = {name: getattr(section, name) for name in shared}
    assert {name for name in shared if getattr(policy, name) != values[name]} == {"async_save"}


def test_every_key_of_the_schema_can_be_set() -> None:
    container = OmegaConf.to_container(OmegaConf.structured(Config(model=composed().model)), resolve=False)
    assert isinstance(container, dict)
    raw = OmegaConf.to_container(compose("train"), resolve=False)
    assert isinstance(raw, dict)
    for section, members in container.items():
        assert section in raw
        if isinstance(members, dict):
            assert set(members) == set(raw[section]), section


def test_a_run_makes_its_own_folder_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a text of some length, " * 40)
    small = ["model.n_layer=1", "model.n_embd=8", "model.n_head=2", "train.seq_length=16", "train.train_iters=1"]
    few = ["schedule.lr_warmup_iters=0", "data=text", "data.path=book.txt", "data.cache=cache"]
    ended = run(tmp_path, "run.name=one", *small, *few, "logging.tensorboard=false")
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "cache", "runs"]
    made = tmp_path / "runs" / "one"
    assert sorted(path.name for path in made.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "launches.jsonl",
        "lock",
        "metrics.jsonl",
        "run.json",
    ]
