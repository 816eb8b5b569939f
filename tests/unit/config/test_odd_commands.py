"""Every odd command line is refused in one message before anything starts, and none ends in a traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import ConfigError, LaunchError
from tests.harness import DEADLINE_S
from trainer.config.checks import loose_threads, unused_keys, validate
from trainer.config.compose import command_parser, compose
from trainer.config.options import CONFIGS, keys
from trainer.launch.environment import Environment
from trainer.run.dry_run import report
from trainer.run.memory_needs import host_bytes, least_bytes, require_host_memory, require_memory

HUGE = str(1 << 63)

# Overrides, and words of the message.
ODD: list[tuple[str, str]] = [
    ("optimizer.adam_eps=0", "optimizer.adam_eps=0.0: must be above 0"),
    ("train.ema_offload=true", "needs train.ema_decay above 0, or train.ema_offload=false"),
    # numbers that are not finite, or fit into no machine word
    (f"train.seed={HUGE}", f"train.seed={HUGE}"),
    ("train.seed=-1", "train.seed=-1: must be 0 or more"),
    ("train.seed=1e30", "train.seed"),
    ("train.threads=-1", "train.threads=-1: must be 0"),
    ("train.threads=4097", "train.threads=4097: must be 0 (a share of the cores) or more, at most 4096"),
    ("parallel.invariant_ranks=-2", "parallel.invariant_ranks=-2: must be 0, 1 or 2"),
    ("parallel.invariant_ranks=3", "parallel.invariant_ranks=3: must be 0, 1 or 2"),
    ("parallel.invariant_ranks=1.5", "invariant_ranks"),
    ("parallel.invariant_ranks=null", "invariant_ranks"),
    (f"parallel.invariant_ranks={HUGE}", "64 bits"),
    (f"train.train_iters={HUGE}", "64 bits"),
    (f"train.global_batch_size={HUGE}", "64 bits"),
    (f"checkpoint.file_bytes={HUGE}", "64 bits"),
    (f"checkpoint.staging_bytes={HUGE}", "64 bits"),
    (f"checkpoint.ckpt_step={HUGE}", "64 bits"),
    ("checkpoint.ckpt_step=-1", "checkpoint.ckpt_step=-1"),
    ("model.n_layer=1e400", "n_layer"),
    *(
        (f"{key}={value}", f"{key}={value}: must be a finite number")
        for value in ("nan", "inf", "-inf")
        for key in (
            "train.clip_grad",
            "train.exit_duration_in_mins",
            "train.exit_signal_save_seconds",
            "train.distributed_timeout_minutes",
            "checkpoint.commit_timeout_s",
            "checkpoint.stall_timeout_s",
            "checkpoint.save_interval_mins",
            "optimizer.lr",
            "optimizer.adam_beta1",
            "optimizer.adam_eps",
            "schedule.min_lr",
            "data.valid_fraction",
            "model.dropout",
            "model.norm_eps",
        )
    ),
    ("train.exit_signal_save_seconds=1e300", "at most 1e+09"),
    ("train.distributed_timeout_minutes=1e300", "at most 1e+07"),
    ("checkpoint.commit_timeout_s=1e300", "at most 1e+09"),
    ("checkpoint.stall_timeout_s=0", "above 0"),
    ("model=llama3_1b model.rope_scaling.factor=nan", "model.rope_scaling.factor=nan"),
    # lists and mappings in the place of other values
    ("train.freeze=[['a']]", "train.freeze=[['a']]: must be a list of str"),
    ("train.freeze=${train.seed}", "train.freeze=1234: must be a list of str"),
    ("checkpoint.local=${train.seed}", "checkpoint.local=1234: must be a section of keys"),
    ("run=${train.seed}", "node `run` is not a container"),
    ("model.lora=${train.seed}", "model.lora=1234: must be a section of keys"),
    ("checkpoint.save_steps=[[1]]", "checkpoint.save_steps=[[1]]: must be a list of int"),
    ("data=token_file data.train={path:a,weight:1}", "must be a path, or a list"),
    ("data=token_file data.train=[{path:a,weight:1e999999999}]", "data.train[0].weight"),
    ("data=token_file data.train=[{path:a,weight:1/1e999999999}]", "data.train[0].weight"),
    # interpolations
    ("run.dir=${oc.env:NO_SUCH_VARIABLE_HERE}", "NO_SUCH_VARIABLE_HERE"),
    ("run.name=${nothing.here}", "nothing.here"),
    ("run.name=${foo:bar}", "foo"),
    ("run.name=${run.name}", "Recursive"),
    ("run.name=${", "run.name='${'"),
    ("run.name=???", "name"),
    ("train.seed=???", "seed"),
    ("run.dir=runs/${now:%H}", "depends on the time"),
    # keys and values that Hydra does not take
    ("=3", "(=3)"),
    ("model=null", "(model=null)"),
    ("data=null", "(data=null)"),
    ("checkpoint=null", "checkpoint=null"),
    ("experiment=null", "(experiment=null)"),
    ("model=", "gpt2_tiny"),
    ("model=gpt5", "gpt2_tiny"),
    ("model=gpt2_tiny,llama3_tiny", "no multirun"),
    ("train.seed=1,2", "no multirun"),
    ("train.seed=range(1,3)", "no multirun"),
    ("train", "train"),
    ("train.seed==3", "Value '=3' of type 'str' could not be converted to Integer"),
    ("???", "???"),
    ("@", "@"),
    ("a=b=c", "Key 'a' not in 'Config'"),
    ("train.seed=true", "seed"),
    ("train=null", "train"),
    ("train.seed=null", "train.seed"),
    ("run.name=[1,2]", "name"),
    ("model.head_dim=3", "head_dim"),
    ("hydra.run.dir=elsewhere", "hydra.run.dir"),
    ("hydra.mode=MULTIRUN", "hydra.mode"),
    ("+hydra.job.x=1", "hydra.job"),
    ("hydra/launcher=basic", "hydra/launcher"),
    # keys that nothing reads, sections that are not there
    ("+typo=1", "typo is unknown"),
    ("+train.typo=1", "train.typo is unknown"),
    ("++checkpoint.typo=1", "checkpoint.typo is unknown"),
    ("+train.deep.typo=1", "train.deep is unknown"),
    ("~train", "train is removed"),
    ("~model", "model is removed"),
    ("~train.seed", "train.seed"),
    ("train.train_iter=5", "Could not override 'train.train_iter': Key 'train_iter' not in 'TrainSection'"),
    ("train.train_iter=5", "Did you mean train.train_iters?"),
    ("lr=5", "Did you mean optimizer.lr?"),
    ("modle=gpt2_tiny", "Did you mean model?"),
    ("+train.train_iter=5", "Did you mean train.train_iters?"),
    ("model=gpt2_tinny", "Did you mean model=gpt2_tiny?"),
    ("parallel=zero4", "Did you mean parallel=zero"),
    ("train.dtype=bf16", "Did you mean train.dtype=bfloat16?"),
    ("checkpoint.verify=ful", "Did you mean checkpoint.verify=full?"),
    # paths
    *((f"{key}=", f"{key}=: is empty") for key in ("run.dir", "run.name", "checkpoint.save", "checkpoint.load")),
    ("run.name='  '", "run.name=  : is empty"),
    ("data.cache=", "data.cache=: is empty"),
    ("data=text data.path=", "data.path=: is empty"),
    ("data=text data.path=a data.tokenizer=", "data.tokenizer=: is empty"),
    ("data=token_file data.train=", "data.train=: is empty"),
    ("data=token_file data.train=a data.valid=", "data.valid=: is empty"),
    ("run.dir=s3://bucket/run", "run.dir=s3://bucket/run: is a URL"),
    ("run.name=file://x", "run.name=file://x: is a URL"),
    ("checkpoint.save=S3://bucket/run", "checkpoint.save=S3://bucket/run: is a URL"),
    ("checkpoint.load=hdfs://host/run", "checkpoint.load=hdfs://host/run: is a URL"),
    (
        "checkpoint.load=hf://org/model",
        "checkpoint.load=hf://org/model: is the URL of a hub: run `hf download org/model",
    ),
    ("data=token_file data.train=hf://datasets/o/d data.valid=v", "run `hf download --repo-type dataset o/d"),
    ("data=text data.path=gs://bucket/*.txt", "data.path=gs://bucket/*.txt: is a URL"),
    ("data=text data.path=a data.tokenizer=https://host/t.json", "data.tokenizer=https://host/t.json: is a URL"),
    ("data=token_file data.train=s3://a data.valid=s3://b", "data.valid=s3://b: is a URL"),
    ("data.cache=s3://bucket", "data.cache=s3://bucket: is a URL"),
    # models and batches that no host holds
    ("model.n_layer=1000000", "must be at most 10000"),
    ("model.n_layer=1000000 train.dry_run=true", "must be at most 10000"),
    ("model.n_embd=1000000000", "parameters"),
    ("model=llama3_405b train.device=cpu", "405,853,388,800 parameters"),
    ("model.vocab_size=100000000000 train.device=cpu", "memory of this host"),
    ("model.pad_vocab_multiple=100000000000 train.device=cpu", "memory of this host"),
    ("train.global_batch_size=100000000000 train.device=cpu", "100,000,000,000 samples"),
    (f"train.dry_run_ranks={1 << 40}", "train.dry_run_ranks"),
]


def check(arguments: Sequence[str]) -> None:
    """Compose and check a configuration as the command does before it imports torch."""
    config = compose(arguments)
    validate(config, 1)
    require_host_memory(config, 1, 1)


@pytest.mark.parametrize(("overrides", "words"), ODD, ids=[row[0] for row in ODD])
def test_an_odd_override_is_refused_in_one_message(overrides: str, words: str) -> None:
    arguments = [overrides] if "'" in overrides else overrides.split()
    with pytest.raises(ConfigError) as refusal:
        check(arguments)
    assert words in str(refusal.value)
    for useless in ("reference_type", "To append", "Config search path", "provider="):
        assert useless not in str(refusal.value)


def test_all_unknown_keys_and_wrong_values_are_in_one_message() -> None:
    words = ["run.nme=k1", "train.lr=3", "model.foo=1", "train.seed=x", "train.threads=1"]
    with pytest.raises(ConfigError) as refusal:
        compose(words)
    message = str(refusal.value)
    assert [word for word in words if word.partition("=")[0] in message] == words[:-1]
    assert re.findall(r"Did you mean ([\w.]+)\?", message)[:2] == ["run.name", "optimizer.lr"]


def test_a_wrong_number_of_processes_hides_no_other_problem() -> None:
    words = ["parallel=tp2", "train.seed=-1", "train.global_batch_size=7"]
    with pytest.raises(ConfigError) as refusal:
        validate(compose(words), 1, words)
    message = str(refusal.value)
    assert "train.seed=-1" in message
    assert "train.global_batch_size=7" in message
    assert f"torchrun --no-python --nproc-per-node 2 reprise train {' '.join(words)}" in message
    with pytest.raises(ConfigError, match=r"1 rank: must be a multiple"):  # of a dry run
        validate(compose(words[:1]), 1)


ODD_VALUES = (
    "[[1]]",
    "[['a']]",
    "{a:1}",
    "{path:a,weight:1}",
    "[{path:a,weight:1e999999999}]",
    "[null]",
    "null",
    "",
    "-1",
    "0",
    "1000000",
    HUGE,
    "1e400",
    "nan",
    "-inf",
    "训练",
    "true",
    "9" * 400,
    "${train.seed}",
    "[]",
    "{}",
)


@pytest.mark.parametrize("every", [257, pytest.param(1, marks=pytest.mark.nightly)])
def test_odd_values_of_every_key_end_in_one_message(every: int) -> None:
    words = [f"{key}={value}" for key in keys() for value in ODD_VALUES]
    for word in words[::every]:
        with suppress(ConfigError):
            config = compose([word])
            validate(config, 1)
            require_host_memory(config, 1, 1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is out of range"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is out of range"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not a number"),
        ({"WORLD_SIZE": HUGE}, "WORLD_SIZE is out of range"),
        ({"RANK": "x"}, "RANK is not a number"),
        ({"RANK": "1"}, "RANK is out of range"),
        ({"RANK": "-1"}, "RANK is out of range"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}, "expected MASTER_PORT beside WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "0"}, "expected MASTER_PORT beside"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "expected RANK and MASTER_ADDR beside WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is out of range"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is out of range"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is out of range"),
    ],
)
def test_odd_variables_of_a_launcher_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        Environment.read(variables)


def test_surrogates_in_an_override_are_refused() -> None:
    with pytest.raises(ConfigError):
        compose([f"run.name={os.fsdecode(bytes([0xFF]))}"])
    config = compose([])
    config.run.name = os.fsdecode(b"a\xff")
    with pytest.raises(ConfigError, match=r"run\.name=a\\udcff: is not valid UTF-8"):
        validate(config, 1)


def test_a_host_s_memory_is_that_of_its_control_group_and_swap() -> None:
    meminfo = "MemTotal:       2048 kB\nMemFree:  1 kB\nSwapTotal:      1024 kB\n"
    assert host_bytes(meminfo) == 3 << 20
    assert host_bytes(meminfo, "1048576\n") == 2 << 20
    assert host_bytes(meminfo, "max\n") == 3 << 20
    assert host_bytes("") is None


def test_the_least_memory_counts_replicas_and_shards() -> None:
    config = compose(["train.micro_batch_size=1", "parallel=zero1"])
    whole = least_bytes(config, 1)
    tokens = 8 * 8 * 129
    assert whole == 16 * 859_008 + tokens
    assert least_bytes(config, 2) == 16 * 859_008 // 2 + tokens // 2
    config.parallel.zero_stage = 0
    assert least_bytes(config, 2) == 16 * 859_008 + tokens // 2
    require_memory(config, 2, ranks=2, available_bytes=2 * least_bytes(config, 2), where="here")
    with pytest.raises(ConfigError, match=r"memory of here \(2 of 2 ranks\)"):
        require_memory(config, 2, ranks=2, available_bytes=2 * least_bytes(config, 2) - 1, where="here")


def test_the_least_memory_of_a_host_counts_light_saves() -> None:
    plain = compose(["train.micro_batch_size=1", "parallel=zero1"])
    light = compose(["train.micro_batch_size=1", "parallel=zero1", "checkpoint.save_steps=[0]"])
    assert least_bytes(light, 2) - least_bytes(plain, 2) == 2 * 859_008 // 2
    assert least_bytes(light, 2, is_host=False) == least_bytes(plain, 2)
    assert "saves of the weights alone: at most" in report(light, 2)
    assert "saves of the weights alone" not in report(plain, 2)
    with pytest.raises(ConfigError, match="the weights rounded for light saves, and 8 samples"):
        require_memory(light, 2, ranks=1, available_bytes=least_bytes(plain, 2), where="here")
    light.checkpoint.save = None
    assert least_bytes(light, 2) == least_bytes(plain, 2)


def test_the_memory_of_offloaded_averages_is_the_host_s() -> None:
    plain = compose(["train.micro_batch_size=1", "parallel=zero1"])
    kept = compose(["train.micro_batch_size=1", "parallel=zero1", "train.ema_decay=0.9"])
    offloaded = compose(["train.micro_batch_size=1", "parallel=zero1", "train.ema_decay=0.9", "train.ema_offload=true"])
    assert least_bytes(offloaded, 2) == least_bytes(kept, 2) == least_bytes(plain, 2) + 4 * 859_008 // 2
    assert least_bytes(offloaded, 2, is_host=False) == least_bytes(plain, 2)
    assert least_bytes(kept, 2, is_host=False) == least_bytes(kept, 2)
    large = ["model=llama3_1b", "data=stdlib", "train.micro_batch_size=1", "parallel=zero1", "train.ema_decay=0.9"]
    on_device, on_host = (report(compose([*large, *more]), 2) for more in ([], ["train.ema_offload=true"]))
    assert "9.21 GiB  9.21 GiB" in on_device  # state, working
    assert "6.91 GiB  9.21 GiB" in on_host
    line = "moving averages: at most 2.30 GiB more on the host of a rank"
    assert [line in text for text in (on_device, on_host)] == [False, True]


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CONFIGS.parent), **variables}
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["=3"], {}, "ConfigError: The configuration cannot be composed (=3)"),
        (["train.dry_run=true", "train.dry_run_ranks=0"], {}, "ConfigError: The configuration cannot run"),
        (["run.dir=${oc.env:NO_SUCH_VARIABLE_HERE}"], {"HYDRA_FULL_ERROR": "1"}, "ConfigError: "),
        (["--multirun", "train.seed=1,2"], {}, "ConfigError: A command runs one configuration"),
        (["-m"], {}, "found --multirun"),
        (["checkpoint.save=s3://bucket/run"], {}, "ConfigError: "),
        (["checkpoint.save="], {}, "ConfigError: "),
        ([], {"WORLD_SIZE": "0"}, "LaunchError: The environment variable WORLD_SIZE"),
        ([], {"RANK": "x"}, "LaunchError: The environment variable RANK"),
        (["--cfg", "job", "--resolve", "run.name=${x}"], {}, "ConfigError: "),
    ],
)
def test_the_command_prints_one_message_and_makes_no_file(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], words: str
) -> None:
    ended = run(tmp_path, *arguments, **variables)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith(words) or words in ended.stderr.splitlines()[0]
    assert "Traceback" not in ended.stderr
    assert "HYDRA_FULL_ERROR" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failing_file_system_is_one_message(tmp_path: Path) -> None:
    ended = run(tmp_path, "model=gpt2_tiny", f"checkpoint.load={'x' * 300}")
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch(r"OSError: The file system fails \(x+/checkpoints\), found File name too long .*", line)
    assert ended.returncode == 1


def test_threads_that_follow_the_cores_are_named() -> None:
    lanes = ["parallel.invariant_ranks=2", "train.micro_batch_size=1"]
    (line,) = loose_threads(compose(lanes))
    assert line.startswith("train.threads is 0, so a rank has its share of the cores of its host")
    assert loose_threads(compose([*lanes, "train.threads=1"])) == loose_threads(compose([])) == []


def test_one_key_switches_saving_off_and_unused_keys_are_named() -> None:
    config = compose(["experiment=demo", "checkpoint.save=null", "checkpoint.max_checkpoint_keep=2"])
    validate(config, 1)
    (line,) = unused_keys(config)
    assert line.endswith("not used: checkpoint.max_checkpoint_keep=2")
    assert unused_keys(compose(["checkpoint.save=null"])) == []
    assert unused_keys(compose(["experiment=demo"])) == []


def test_argparse_may_check_the_help_of_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    add_argument = argparse._ActionsContainer.add_argument

    def add(container: argparse._ActionsContainer, *names: str, **options: Any) -> argparse.Action:
        assert "%" not in options["help"]  # as argparse asks from Python 3.14 on, which fails with Hydra's object
        return add_argument(container, *names, **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", add)
    parser = command_parser()
    assert argparse.ArgumentParser.add_argument is add
    (completion,) = [action for action in parser._actions if "--shell-completion" in action.option_strings]
    assert "eval" in str(completion.help)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("trainer.commands.doctor", ["hdfs://host/runs"]),
        ("trainer.commands.prepare_data", ["in.txt", "--output", "gs://bucket/data"]),
        ("trainer.commands.convert", ["import", "hf", "model", "s3://bucket/run/checkpoints"]),
        ("trainer.commands.convert", ["export", "hf", "run", "s3://bucket/model"]),
        ("trainer.commands.convert", ["import", "hf", "s3://bucket/model", "checkpoints"]),
    ],
)
def test_a_script_takes_no_url(module: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(arguments)
    assert ended.value.code == 2
    assert "is a URL; only paths of mounted file systems can be used" in capsys.readouterr().err


@pytest.mark.parametrize("weight", ["1e999999999", "1e9_9_9_9_9_9_9", "1e+9_9_9_9_9_9_9"])
def test_a_weight_of_many_digits_is_refused_unexpanded(weight: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.train\[0\]\.weight={re.escape(weight)}: must be a number above 0"):
        check(["data=token_file", f"data.train=[{{path: a, weight: '{weight}'}}]"])
