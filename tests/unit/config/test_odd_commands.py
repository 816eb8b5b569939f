"""Every odd command line is refused in one message before anything starts, and none ends in a traceback."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from reprise.errors import ConfigError, LaunchError
from tests.harness import DEADLINE_S
from tests.messages import refused
from trainer.config.checks import validate
from trainer.config.compose import compose, unlike
from trainer.config.options import CONFIGS
from trainer.config.schema import key_types
from trainer.launch.environment import Environment

# Commands that cannot run, one a paragraph, most of them on one rank. The message names each key, or each after a bar.
ODD = """
optimizer.adam_eps=0 optimizer.adam_beta1=1 optimizer.adam_beta2=-0.1 optimizer.weight_decay=-0.1
optimizer.muon_ns_steps=0 optimizer.muon_momentum=1 train.clip_grad=-0.5 train.eval_interval=-1
train.exit_interval=-2 train.seq_length=257 train.device=tpu train.threads=-1 logging.log_interval=0
logging.publish=wandbb checkpoint.save_interval=-1 checkpoint.max_checkpoint_keep=-1 checkpoint.file_bytes=0
checkpoint.save_retain_interval=-1 checkpoint.save_weights_interval=-1 checkpoint.weights_keep=-1
checkpoint.commit_timeout_s=0 checkpoint.stall_timeout_s=0 checkpoint.local.save_interval=-1 checkpoint.local.keep=0
checkpoint.local.copies=-1 checkpoint.save_steps=[4,-1] checkpoint.full_steps=[4,0] train.max_micro_batch_size=0
checkpoint.ckpt_step=-1 train.seed=-1 parallel.zero_stage=4 parallel.replicate=0 data.valid_fraction=1
schedule.lr_decay_iters=0 schedule.lr_warmup_iters=-1

train.train_iters=0 optimizer.muon_ns_steps=100 train.threads=4097 train.micro_batch_size=-1 model.n_layer=0

train.distributed_timeout_minutes=1e300 checkpoint.commit_timeout_s=1e300 checkpoint.local.dir=c checkpoint.save=c

optimizer.moments_dtype=bfloat16 | optimizer.adam_beta1=0.9961 optimizer.adam_beta2=0.999 optimizer.muon_momentum=0.9964

model.pad_vocab_multiple=0 model.n_head=3 model.n_kv_head=2 model.eos_token_id=257

train.seed=9223372036854775808 train.train_iters=9223372036854775808 train.global_batch_size=9223372036854775808
checkpoint.file_bytes=9223372036854775808 checkpoint.staging_bytes=9223372036854775808 model.n_layer=9223372036854775808
checkpoint.ckpt_step=9223372036854775808 parallel.invariant_ranks=9223372036854775808 optimizer.lr=inf
schedule.min_lr=-inf train.clip_grad=nan train.exit_duration_in_mins=nan
train.distributed_timeout_minutes=nan checkpoint.commit_timeout_s=nan checkpoint.stall_timeout_s=nan
checkpoint.save_interval_mins=nan optimizer.adam_beta1=nan optimizer.adam_eps=nan optimizer.weight_decay=nan
data.valid_fraction=nan model.dropout=nan model.norm_eps=nan

model=llama3_1b | model.rope_scaling.factor=nan

train.seed=1e30

model.n_layer=1e400

train.freeze=[['a']]

train.freeze=${train.seed} checkpoint.local=${train.seed} model.lora=${train.seed}

run=${train.seed}

checkpoint.save_steps=[[1]]

data=token_file | data.train={path:a,weight:1}

data=token_file | data.train=[{path:a,weight:1e999999999}]

data=token_file | data.train=[{path:a,weight:1/1e999999999}]

data=token_file | data.train=[{path:a,weight:1e9_9_9_9_9_9_9}]

run.dir=${oc.env:NO_SUCH_VARIABLE_HERE}

run.name=${nothing.here}

run.name=${foo:bar}

run.name=${run.name}

run.name=${

run.name=???

train.seed=???

run.dir=runs/${now:%H}

=3

model=null

checkpoint=null

experiment=null

model=

model=gpt5

model=gpt2_tiny,llama3_tiny

train.seed=range(1,3)

train

train.seed==3

???

@

a=b=c

train=null

train.seed=null

hydra.run.dir=elsewhere

hydra.mode=MULTIRUN

+hydra.job.x=1

hydra/launcher=basic

+typo=1 +train.typo=1 ++checkpoint.typo=1 +train.train_iter=5

+train.deep={typo:1}

~train

~train.seed

train.train_iter=5 lr=5 train.dtype=bf16 schedule.lr_decay_style=step
checkpoint.reshard=perhaps train.seed=true

modle=gpt2_tiny

model=gpt2_tinny

parallel=zero4

run.dir= run.name= checkpoint.save= checkpoint.load= data.cache=

run.name='  '

data.path=book.txt

data=text | data.path=null

data=text | data.path= data.tokenizer=

data=token_file | data.train= data.valid=

data=token_file data.train=a | train.eval_interval=5

run.dir=s3://bucket/run run.name=file://x checkpoint.save=S3://bucket/run checkpoint.load=hdfs://host/run

data=text | data.path=gs://bucket/*.txt data.tokenizer=https://host/t.json data.cache=s3://b checkpoint.load=hf://o/m

data=token_file | data.train=hf://datasets/o/d data.valid=s3://b

train.dry_run=true | model.n_layer=1000000

model.n_embd=1000000000 |

model.head_dim=3

model.stop_token_ids=[[1]]

model=llama3_tiny | model.n_kv_head=3 model.dropout=0.1

train.freeze=[transformer.h.7.*]

train.freeze=[transformer.wte.weight,lm_head.*]

train.freeze=[*]

model.lora.rank=4

checkpoint.base=b

checkpoint.base=b train.freeze=[transformer.h.0.*] | model.lora.rank=4

checkpoint.base=b model.lora.rank=4 train.compile=true | model.lora.dropout=0.1 optimizer.name=muon

checkpoint.base=b model.lora.rank=4 | model.lora.target_modules=[q_proj]

train.dry_run_ranks=1099511627776

schedule.lr_decay_iters=5 | schedule.min_lr=1 schedule.lr_wsd_decay_iters=10 schedule.lr_warmup_iters=10

schedule.lr_warmup_iters=101

schedule=wsd | schedule.lr_wsd_decay_iters=91

checkpoint.override_scheduler=true checkpoint.use_checkpoint_scheduler=true checkpoint.resize=true

checkpoint.finetune=true

checkpoint.load=none checkpoint.ckpt_step=5

train.global_batch_size=9

train.global_batch_size=0

train.micro_batch_size=all

train.micro_batch_size=auto | parallel.tensor_model_parallel_size=0

parallel.invariant_ranks=1.5

parallel.invariant_ranks=-2

parallel.invariant_ranks=3

parallel.invariant_tensor_ranks=1

parallel.invariant_ranks=1 train.compile=true | parallel.invariant_tensor_ranks=1

parallel.invariant_ranks=1 | parallel.invariant_tensor_ranks=2

parallel.invariant_ranks=1 model.pad_vocab_multiple=4 | parallel.invariant_tensor_ranks=8

model=llama3_tiny model.n_kv_head=2 model.pad_vocab_multiple=4 parallel.invariant_ranks=1 |
parallel.invariant_tensor_ranks=4

2 ranks: parallel=tp2 parallel.invariant_ranks=1 | parallel.invariant_tensor_ranks=1

2 ranks: parallel=tp2_sp parallel.invariant_ranks=1 model.pad_vocab_multiple=4 |
train.seq_length=6 parallel.invariant_tensor_ranks=4

2 ranks: parallel.zero_stage=0 | parallel.replicate=2

2 ranks: parallel.replicate=2

2 ranks: parallel.invariant_ranks=1

2 ranks: train.global_batch_size=12 train.micro_batch_size=2 checkpoint.load=none |
train.batch_schedule='0:4 8:2 1k:7 24k:12'

3 ranks: parallel=ddp | train.global_batch_size=8

3 ranks: train.global_batch_size=48 | parallel.invariant_ranks=4

4 ranks: train.global_batch_size=32 | parallel.invariant_ranks=2

4 ranks: parallel=tp2 train.global_batch_size=16 | parallel.invariant_ranks=1

4 ranks: parallel=pp2 | train.global_batch_size=12

6 ranks: parallel=pp2 train.micro_batch_size=1 | train.global_batch_size=8

7 ranks: train.micro_batch_size=auto | train.global_batch_size=6

8 ranks: train.micro_batch_size=1 | parallel.replicate=3
"""


def check(arguments: Sequence[str], *, ranks: int = 1) -> None:
    """Compose and check a configuration as the command does before it imports torch."""
    validate(compose(arguments), ranks)


@pytest.mark.parametrize("command", ODD.strip().split("\n\n"), ids=lambda command: command[:60])
def test_an_odd_command_is_refused_in_one_message(command: str) -> None:
    ranks, _, overrides = command.rpartition(" ranks: ")
    others, _, wrong = (re.findall(r"(?:'[^']*'|[^ \n'])+", words) for words in overrides.rpartition("|"))
    names = [re.sub(r"^[+~]+|=.*", "", word) or word for word in wrong]
    with refused(ConfigError, *names) as caught:
        check(others + wrong, ranks=int(ranks or 1))
    for useless in ("reference_type", "To append", "Config search path", "provider="):
        assert useless not in str(caught.value)


def test_a_wrong_number_of_processes_hides_no_other_problem() -> None:
    words = ["parallel=tp2", "train.seed=-1", "train.global_batch_size=7"]
    with refused(ConfigError, "train.seed=-1", "train.global_batch_size=7", "--nproc-per-node 2"):
        validate(compose(words), 1)


ODD_VALUES = [
    "[[1]]", "[['a']]", "{a:1}", "{path:a,weight:1}", "[{path:a,weight:1e999999999}]", "[null]", "null", "", "-1", "0",
    "1000000", str(1 << 63), "1e400", "nan", "-inf", "训练", "true", "9" * 400, "${train.seed}", "[]", "{}",
]  # fmt: skip


@pytest.mark.parametrize("every", [257, pytest.param(1, marks=pytest.mark.nightly)])
def test_odd_values_of_every_key_end_in_one_message(every: int) -> None:
    words = [f"{key}={value}" for key in key_types() for value in ODD_VALUES]
    for word in words[::every]:
        with suppress(ConfigError):
            check([word])


@pytest.mark.parametrize(
    "variables",
    [
        "WORLD_SIZE=0", "WORLD_SIZE=-2", "WORLD_SIZE=x", "WORLD_SIZE=", f"WORLD_SIZE={1 << 63}", "RANK=x", "RANK=1",
        "RANK=-1", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=0", "MASTER_PORT=70000", "RANK=0 WORLD_SIZE=2",
        "RANK=0 MASTER_ADDR=host WORLD_SIZE=2", "RANK=0 MASTER_ADDR=host MASTER_PORT=0 WORLD_SIZE=2",
        "MASTER_PORT=29500 WORLD_SIZE=2",
    ],
)  # fmt: skip
def test_odd_variables_of_a_launcher_are_refused(variables: str) -> None:
    table = dict(word.split("=") for word in variables.split())
    with refused(LaunchError, list(table)[-1]):
        Environment.read(table)


def test_surrogates_in_an_override_are_refused() -> None:
    with refused(ConfigError, "run.name"):
        validate(compose([f"run.name={os.fsdecode(bytes([0xFF]))}"]), 1)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ("=3", {"HYDRA_FULL_ERROR": "1"}, "ConfigError: The configuration cannot be composed (=3)"),
        pytest.param("train.dry_run=true train.dry_run_ranks=0", {}, "ConfigError: ", marks=pytest.mark.slow),
        ("", {"WORLD_SIZE": "0"}, "LaunchError: The environment variable WORLD_SIZE"),
        (f"model=gpt2_tiny checkpoint.load={'x' * 300}", {}, f"OSError: [Errno 36] File name too long: '{'x' * 300}"),
    ],
)
def test_the_command_prints_one_message_and_makes_no_file(
    tmp_path: Path, arguments: str, variables: dict[str, str], words: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CONFIGS.parent), **variables}
    command = [sys.executable, "-m", "trainer", *arguments.split()]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert words in ended.stderr.splitlines()[0]
    assert "Traceback" not in ended.stderr
    assert "HYDRA_FULL_ERROR" not in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} <= ({"runs"} if "load" in arguments else set())


@pytest.mark.parametrize(
    "command",
    [
        "doctor hdfs://host/runs",
        "prepare_data in.txt --output gs://bucket/data",
        "convert import hf model s3://bucket/run/checkpoints",
        "convert export hf run s3://bucket/model",
        "convert import hf s3://bucket/model checkpoints",
    ],
)
def test_a_script_takes_no_url(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, *arguments = command.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"trainer.commands.{module}").main(arguments)
    assert ended.value.code == 2
    assert "is a URL" in capsys.readouterr().err


MANY = "".join(f"key_{number:02}: 1\n" for number in range(12))


@pytest.mark.parametrize(
    ("text", "first", "named"),
    [
        (
            "train:\n  seed: 2\n  lr: 2\n",
            "train:\n  seed: 1\n  lr: 2\ndata: null\n",
            "found other values of data, train.seed.",
        ),
        (MANY, "{}", "key_09 and 2 more"),
    ],
    ids=["two keys", "many keys"],
)
def test_a_rank_with_another_configuration_names_the_keys(text: str, first: str, named: str) -> None:
    with refused(ConfigError, "rank 3", named):
        raise unlike(text, first, rank=3)
