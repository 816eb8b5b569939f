"""Every shipped configuration composes and can run; what cannot run is refused before anything is built."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

import trainer.config.compose  # noqa: F401 (registers the schema)
import trainer.config.options as command
from models.families import parameter_count
from reprise.errors import ConfigError
from reprise.savers import SavePolicy
from tests.harness import DEADLINE_S
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import validate
from trainer.config.derived import length_of, topology_of
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
    "data=datatrove": ["data.train=tokens/*.ds"],
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


@pytest.mark.parametrize("family", ["gpt2_tiny", "llama3_tiny", "qwen3_tiny"])
@pytest.mark.parametrize("schedule", GROUPS["schedule"])
@pytest.mark.parametrize("parallel", GROUPS["parallel"])
def test_groups_combine(family: str, schedule: str, parallel: str) -> None:
    batches = ["train.global_batch_size=16", "train.micro_batch_size=1"]
    config = composed(f"model={family}", f"schedule={schedule}", f"parallel={parallel}", *batches)
    validate(config, world_size=8)


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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parallel", ["zero1", "zero3", "pp2"])
def test_the_demo_can_move_to_more_ranks(ranks: int, parallel: str) -> None:
    validate(composed("experiment=demo", f"parallel={parallel}"), ranks)


def test_an_experiment_s_name_gives_its_model_and_topology() -> None:
    assert set(WORLD_SIZES) == set(GROUPS["experiment"])
    config = composed("experiment=gpt2_124m_tp2_pp2_dp2")
    assert parameter_count(config.model) == SIZES["gpt2_124m"]
    assert topology_of(config, 8) == Topology(pp=2, dp=2, tp=2, sp=True)
    config = composed("experiment=llama3_1b_tp2_sp")
    assert parameter_count(config.model) == SIZES["llama3_1b"]
    assert topology_of(config, 2) == Topology(pp=1, dp=1, tp=2, sp=True)
    config = composed("experiment=llama3_8b_tp8_zero3")
    assert parameter_count(config.model) == SIZES["llama3_8b"]
    assert topology_of(config, 16) == Topology(pp=1, dp=2, tp=8)
    assert config.parallel.zero_stage == 3
    assert topology_of(composed("experiment=reference_3d"), 8) == Topology(pp=2, dp=2, tp=2, vpp=2, sp=True)


def test_the_reference_runs_are_as_long_as_they_are_compared() -> None:
    config = composed("experiment=reference_3d")
    assert (config.train.train_iters, config.checkpoint.save_interval) == (50, 10)
    for name in ("reference_gpt2", "reference_llama3"):
        config = composed(f"experiment={name}")
        assert (config.train.train_iters, config.checkpoint.save_interval) == (100, 20)
        assert config.checkpoint.max_checkpoint_keep == 10


def test_a_choice_of_the_command_wins_over_the_experiment_s() -> None:
    config = composed("experiment=llama3_1b_tp2_sp", "model=llama3_tiny", "parallel=zero2")
    assert parameter_count(config.model) == SIZES["llama3_tiny"]
    assert topology_of(config, 2) == Topology(pp=1, dp=2, tp=1)
    assert config.parallel.zero_stage == 2


def test_the_default_is_small_and_saves_into_the_run_s_folder() -> None:
    config = composed()
    validate(config, world_size=1)
    assert parameter_count(config.model) == SIZES["gpt2_tiny"]
    assert config.checkpoint.save == "runs/default/checkpoints"
    assert composed("run.name=a").checkpoint.save == "runs/a/checkpoints"
    assert composed("checkpoint.save=null").checkpoint.save is None


@pytest.mark.parametrize("schedule", GROUPS["schedule"])
def test_the_default_warm_up_fits_every_length(schedule: str) -> None:
    for train_iters, warmup in {1: 0, 2: 1, 5: 2, 9: 4, 10: 10, 50: 10, 100: 10, 10**6: 10}.items():
        config = composed(f"schedule={schedule}", f"train.train_iters={train_iters}")
        validate(config, world_size=1)
        found = resolve(config.schedule, length_of(config.train), config.optimizer.lr)
        assert (found.warmup, found.decay) == (warmup, train_iters)
    extended = composed(f"schedule={schedule}", "train.train_iters=5", "schedule.lr_decay_iters=100")
    validate(extended, world_size=1)
    assert resolve(extended.schedule, length_of(extended.train), 1e-3).warmup == 10


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
    """Two differ: a call of the library saves once, and returns when the checkpoint is there."""
    policy, section = SavePolicy(None), CheckpointSection()
    shared = {field.name for field in fields(SavePolicy)} & {field.name for field in fields(CheckpointSection)}
    values = {name: getattr(section, name) for name in shared}
    values = {name: frozenset(value) if isinstance(value, list) else value for name, value in values.items()}
    assert {name for name in shared if getattr(policy, name) != values[name]} == {
        "save_interval",
        "async_save",
    }


def test_every_key_of_the_schema_can_be_set() -> None:
    container = OmegaConf.to_container(OmegaConf.structured(Config(model=composed().model)), resolve=False)
    assert isinstance(container, dict)
    raw = OmegaConf.to_container(compose("train"), resolve=False)
    assert isinstance(raw, dict)
    for section, members in container.items():
        assert section in raw
        if isinstance(members, dict):
            assert set(members) == set(raw[section]), section


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.train_itters=3", ["train_itters"]),
        ("trian.seed=3", ["trian"]),
        ("model.n_layers=3", ["n_layers"]),
        ("train.train_iters=many", ["train_iters", "many"]),
        ("optimizer.lr=fast", ["lr", "fast"]),
        ("train.dtype=float16", ["dtype", "float16"]),
        ("schedule.lr_decay_style=step", ["lr_decay_style", "step"]),
        ("checkpoint.reshard=perhaps", ["reshard", "perhaps"]),
        ("model=gpt3", ["gpt3", "gpt2_tiny"]),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_refused_by_name(override: str, words: list[str]) -> None:
    with pytest.raises(HydraException) as refusal:
        compose("train", overrides=[override])
    message = f"{refusal.value} {refusal.value.__cause__}"
    assert all(word in message for word in words), message


IMPOSSIBLE: list[tuple[int, list[str], list[str]]] = [
    (1, ["train.global_batch_size=9"], ["train.global_batch_size=9: must be a multiple of train.micro_batch_size=4;"]),
    (3, [], ["train.global_batch_size=8: must be at least 12", "the 3 data-parallel ranks"]),
    (6, ["parallel=pp2", "train.micro_batch_size=1"], ["the 3 data-parallel ranks, that is of 3: their shares are"]),
    (1, ["train.micro_batch_size=all"], ["train.micro_batch_size=all: must be an integer, or auto"]),
    (
        2,
        ["parallel=tp2", "parallel.pipeline_model_parallel_size=2", "train.micro_batch_size=auto"],
        ["2 ranks: must be"],
    ),
    (
        1,
        ["parallel.tensor_model_parallel_size=0", "train.micro_batch_size=auto"],
        ["tensor_model_parallel_size=0: must"],
    ),
    (1, ["train.max_micro_batch_size=0"], ["train.max_micro_batch_size=0: must be at least 1"]),
    *(
        (
            1,
            [f"parallel.invariant_ranks={count}"],
            [f"parallel.invariant_ranks={count}: must be 0, 1 or 2: ", "2 micro"],
        )
        for count in (-1, -2, 3, 4, 6, 1 << 40)
    ),
    (2, ["parallel.invariant_ranks=1"], ["parallel.invariant_ranks=1: must be 0 or 2: ", "the 2 data-parallel ranks"]),
    (4, ["parallel.invariant_ranks=2", "train.global_batch_size=32"], ["must be 0, 4 or 8: ", "the 8 micro batches"]),
    *(
        (
            3,
            [f"parallel.invariant_ranks={count}", "train.global_batch_size=48"],
            ["must be 0 (off) on 3 data-parallel ranks", "the 12 micro batches", ": 1, 2 or 4"],
        )
        for count in (-4, 3, 4, 6)
    ),
    (
        4,
        ["parallel=tp2", "parallel.invariant_ranks=1", "train.global_batch_size=16"],
        ["must be 0, 2 or 4: ", "the 2 data-parallel ranks"],
    ),
    (
        4,
        ["parallel=pp2", "parallel.invariant_ranks=1", "train.global_batch_size=16"],
        ["must be 0, 2 or 4: ", "the 2 data-parallel ranks"],
    ),
    *(
        (
            1,
            [f"parallel.invariant_tensor_ranks={count}", "parallel.invariant_ranks=1", "model.pad_vocab_multiple=4"],
            [f"parallel.invariant_tensor_ranks={count}: must be 0, 1, 2 or 4: ", "model.n_head=4"],
        )
        for count in (-1, -2, 3, 6, 8, 1 << 40)
    ),
    (
        2,
        ["parallel=tp2", "parallel.invariant_tensor_ranks=1", "parallel.invariant_ranks=1"],
        ["must be 0: ", "the padding of model.pad_vocab_multiple=257", "parallel.tensor_model_parallel_size=2"],
    ),
    (
        2,
        [
            "parallel=tp2_sp",
            "parallel.invariant_tensor_ranks=4",
            "parallel.invariant_ranks=1",
            "train.seq_length=6",
            "model.pad_vocab_multiple=4",
        ],
        ["must be 0 or 2: ", "train.seq_length=6"],
    ),
    (
        1,
        [
            "model=llama3_tiny",
            "model.n_kv_head=2",
            "model.pad_vocab_multiple=4",
            "parallel.invariant_ranks=1",
            "parallel.invariant_tensor_ranks=4",
        ],
        ["must be 0, 1 or 2: ", "model.n_kv_head=2"],
    ),
    (
        1,
        ["parallel.invariant_tensor_ranks=2", "parallel.invariant_ranks=1"],
        ["must be 0 or 1: ", "; model.pad_vocab_multiple=2 pads the vocabulary"],
    ),
    (1, ["parallel.invariant_tensor_ranks=1"], ["parallel.invariant_tensor_ranks=1: needs parallel.invariant_ranks"]),
    (
        1,
        ["parallel.invariant_tensor_ranks=1", "parallel.invariant_ranks=1", "train.compile=true"],
        ["parallel.invariant_tensor_ranks=1: not with train.compile"],
    ),
    (1, ["model.n_head=3"], ["model.n_head=3", "model.n_embd=128"]),
    (1, ["model=llama3_tiny", "model.n_kv_head=3"], ["model.n_kv_head=3", "model.n_head=4"]),
    (1, ["model.n_kv_head=2"], ["model.n_kv_head=2", "gpt2 needs it equal"]),
    (1, ["model=llama3_tiny", "model.dropout=0.1"], ["model.dropout=0.1", "llama3 has none"]),
    (1, ["model.eos_token_id=257"], ["model.eos_token_id=257", "model.vocab_size=257"]),
    (1, ["model.n_layer=0"], ["model.n_layer=0", "at least 1"]),
    (1, ["model.pad_vocab_multiple=0"], ["model.pad_vocab_multiple=0"]),
    (1, ["schedule.lr_warmup_iters=101"], ["schedule.lr_warmup_iters=101", "train.train_iters=100"]),
    (
        1,
        ["schedule.lr_warmup_iters=10", "schedule.lr_decay_iters=5"],
        ["schedule.lr_warmup_iters=10", "schedule.lr_decay_iters=5"],
    ),
    (1, ["schedule.min_lr=1"], ["schedule.min_lr=1", "optimizer.lr=0.001"]),
    (1, ["schedule.lr_wsd_decay_iters=10"], ["schedule.lr_wsd_decay_iters=10", "lr_decay_style=wsd"]),
    (1, ["schedule=wsd", "schedule.lr_wsd_decay_iters=91"], ["schedule.lr_wsd_decay_iters=91", "fit between"]),
    (1, ["train.train_iters=0", "schedule.lr_warmup_iters=0"], ["train.train_iters=0"]),
    (1, ["train.seq_length=257"], ["train.seq_length=257", "model.max_position_embeddings=256"]),
    (1, ["train.clip_grad=-1"], ["train.clip_grad=-1"]),
    (1, ["train.eval_interval=-1"], ["train.eval_interval=-1"]),
    (1, ["train.device=tpu"], ["train.device=tpu", "auto, cpu, cuda or xpu"]),
    (1, ["logging.log_interval=0"], ["logging.log_interval=0"]),
    (1, ["logging.sinks=[wandbb]"], ["logging.sinks=['wandbb']", "none of tensorboard"]),
    (1, ["parallel.zero_stage=4"], ["parallel.zero_stage=4"]),
    (2, ["parallel.replicate=2", "parallel.zero_stage=0"], ["parallel.replicate=2: needs a parallel.zero_stage above"]),
    (
        8,
        ["parallel.replicate=3", "train.micro_batch_size=1"],
        ["parallel.replicate=3: 8 data-parallel ranks: must divide them"],
    ),
    (2, ["parallel.replicate=2"], ["parallel.replicate=2: 2 data-parallel ranks", "2 ranks or more for a copy"]),
    (2, ["parallel.replicate=0"], ["parallel.replicate=0: must be at least 1"]),
    (1, ["optimizer.adam_beta2=1"], ["optimizer.adam_beta2=1"]),
    (1, ["optimizer.weight_decay=nan"], ["optimizer.weight_decay=nan"]),
    (1, ["data=text"], ["data.path=null: data.kind=text needs a file or a glob"]),
    (1, ["data.path=book.txt"], ["data.path=book.txt", "data.kind=stdlib"]),
    (1, ["data=token_file", "data.train=a.bin", "train.eval_interval=5"], ["train.eval_interval=5", "data.valid"]),
    (1, ["data.valid_fraction=1"], ["data.valid_fraction", "1"]),
    (1, ["checkpoint.max_checkpoint_keep=-1"], ["checkpoint.max_checkpoint_keep=-1"]),
    (1, ["checkpoint.file_bytes=0"], ["checkpoint.file_bytes=0"]),
    (1, ["checkpoint.commit_timeout_s=0"], ["checkpoint.commit_timeout_s=0"]),
    (1, ["checkpoint.finetune=true"], ["checkpoint.finetune", "checkpoint.load=PATH", "auto"]),
    (1, ["checkpoint.ckpt_step=5", "checkpoint.load=none"], ["checkpoint.ckpt_step=5", "checkpoint.load=none"]),
    (
        1,
        ["checkpoint.override_scheduler=true", "checkpoint.use_checkpoint_scheduler=true"],
        ["checkpoint.override_scheduler", "checkpoint.use_checkpoint_scheduler"],
    ),
]


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    IMPOSSIBLE,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_an_impossible_configuration_is_refused_by_key_and_value(
    world_size: int, overrides: Sequence[str], words: Sequence[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        validate(composed(*overrides), world_size)
    message = str(refusal.value)
    assert len(message.splitlines()) == 3, message  # a headline, one problem, a last line
    assert all(word in message for word in words), message


def test_all_problems_stand_in_one_message() -> None:
    config = composed("train.global_batch_size=9", "model.n_head=3", "schedule.lr_warmup_iters=500", "data.path=x")
    with pytest.raises(ConfigError) as refusal:
        validate(config, world_size=1)
    message = str(refusal.value)
    assert [word in message for word in ("global_batch_size=9", "n_head=3", "lr_warmup_iters=500", "data.path")] == [
        True
    ] * 4
    assert len(message.splitlines()) == 6


def test_help_shows_groups_and_keys_and_makes_no_file(tmp_path: Path) -> None:
    ended = run(tmp_path, "--help")
    assert ended.returncode == 0, ended.stderr
    assert all(word in ended.stdout for word in ("llama3_8b", "zero3", "train_iters: 100", "save_interval: 20"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.train_itters=3"], ["train_itters"]),
        (["run.dir=runs/${now:%H-%M}"], ["ConfigError", "run.dir", "depends on the time", "same command"]),
        (["run.name=${now:%H}"], ["ConfigError", "run.name"]),
        (["train.global_batch_size=9"], ["ConfigError", "train.global_batch_size=9", "Nothing was started"]),
    ],
)
def test_a_refused_command_exits_with_1_and_makes_no_file(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    ended = run(tmp_path, *arguments)
    assert ended.returncode == 1
    assert all(word in ended.stderr for word in words), ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


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
