"""A run of transformers' Trainer goes on here as it would have there, and the other way round."""

from __future__ import annotations

import ast
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import SchedulerType

from models.adapters import adapted_modules
from models.families import hf_config, stored_tensors
from reprise.errors import ConfigError, TrainerError
from reprise.loading import open_checkpoint
from reprise.storage import Files
from tests.harness import call_on_ranks, compose, run_ok
from tests.interop import states
from tests.interop.dcp_producers import LLAMA, SAVED, TOTAL, TRAINING, batches, make, make_adamw, sharded, step
from tests.interop.states import assert_carried, opened
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.source import StateSource, of_checkpoint

accelerate = pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")

BOUND = 1e-6
MODELS = {
    "gpt2": ["model=gpt2_tiny"],
    "llama tied": [*LLAMA, "model.tie_word_embeddings=true"],
}
SCHEDULES = {"linear": 0, "cosine": 2, "constant_with_warmup": 2}
# What no file of the Trainer has.
OURS = [word for word in TRAINING if word.startswith(("logging", "checkpoint", "train.seq_length"))]


class InOrder(transformers.Trainer):
    """A Trainer that takes its samples in the order of their positions."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def theirs(config: Any, folder: Path, model: Any = None, **arguments: Any) -> Any:
    """Return a Trainer over the first batches of a run of ours, which saves and logs every iteration."""
    settings: dict[str, Any] = {
        "max_steps": TOTAL,
        "save_steps": SAVED,
        "logging_steps": 1,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "adam_beta2": 0.9,
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    ignored = torch.tensor([-100])  # the first label, which the Trainer counts with GPT-2 although no token precedes it
    data = [{"input_ids": r, "labels": torch.cat([ignored, r[1:]])} for batch in batches(config) for r in batch]
    training = transformers.TrainingArguments(str(folder), **(settings | arguments))
    return InOrder(model or make(config.model), training, train_dataset=data)


def losses_of(run: Path, figure: str = "loss") -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record[figure] for record in records if "event" not in record]


def logged(trainer: Any, figure: str = "loss") -> list[float]:
    return [entry[figure] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) > 1
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= BOUND, (found, expected)


@pytest.mark.parametrize(
    ("family", "kind"), [("gpt2", "linear"), ("llama tied", "cosine"), ("gpt2", "constant_with_warmup")]
)
def test_a_trainers_run_goes_on_here_and_returns(
    tmp_path: Path, family: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose([*TRAINING, *MODELS[family]])
    trainer = theirs(config, tmp_path / "theirs", lr_scheduler_type=kind, warmup_steps=SCHEDULES[kind])
    trainer.train()
    source, run = tmp_path / f"theirs/checkpoint-{SAVED}", tmp_path / "run"
    assert convert.main(["import", "trainer", str(source), str(run / "checkpoints"), "--trust-pickle", *OURS]) == 0
    words = [f"checkpoint.load={run}", "logging.tensorboard=false", "checkpoint.save_interval=1"]
    run_ok(run, words)
    assert_same(losses_of(run), logged(trainer))

    out = tmp_path / "ours/checkpoint-4"
    out.parent.mkdir()
    assert convert.main(["export", "trainer", str(run / "checkpoints/iter_0000004"), str(out)]) == 0
    told = re.search(r"TrainingArguments\(OUTPUT_DIR, \*\*(.*)\)", caplog.text)
    assert told is not None
    back = theirs(config, tmp_path / "back", **ast.literal_eval(told[1]))
    back.train(resume_from_checkpoint=str(out))
    assert_same(logged(back), losses_of(run)[4:])
    assert_same(logged(back, "learning_rate"), losses_of(run, "lr")[4:])
    assert (tmp_path / "back/checkpoint-5").is_dir()  # with our interval of saves


def test_a_finished_trainers_run_goes_on_with_three_keys(tmp_path: Path) -> None:
    config = compose([*TRAINING, *MODELS["gpt2"]])
    theirs(config, tmp_path / "theirs", lr_scheduler_type="linear").train()
    source, run = tmp_path / f"theirs/checkpoint-{TOTAL}", tmp_path / "run"
    assert convert.main(["import", "trainer", str(source), str(run / "checkpoints"), "--trust-pickle", *OURS]) == 0
    words = [f"checkpoint.load={run}", "logging.tensorboard=false"]
    more = [f"train.train_iters={TOTAL + 2}", f"schedule.lr_decay_iters={TOTAL + 3}", "checkpoint.allow=lr"]
    run_ok(run, words)
    count = len(losses_of(run))
    run_ok(run, [*words, *more])
    assert len(losses_of(run)) == count + 2
    assert min(losses_of(run, "lr")[-2:]) > 0


@pytest.mark.parametrize("family", states.cases("gpt2", "llama tied"))
def test_adapters_that_peft_trained_go_on_here(tmp_path: Path, family: str) -> None:
    config = compose([*TRAINING, *MODELS[family]])
    base, run = tmp_path / "base", tmp_path / "run"
    make(config.model).save_pretrained(base)
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = theirs(config, tmp_path / "theirs", peft.get_peft_model(make(config.model), lora))
    trainer.train()
    source, words = tmp_path / f"theirs/checkpoint-{SAVED}", [*OURS, f"checkpoint.base={base}"]
    assert convert.main(["import", "trainer", str(source), str(run / "checkpoints"), "--trust-pickle", *words]) == 0
    run_ok(run, [f"checkpoint.load={run}", f"checkpoint.base={base}", "logging.tensorboard=false"])
    assert_same(losses_of(run), logged(trainer))


def test_a_regular_expression_of_peft_names_modules(tmp_path: Path) -> None:
    config, base, saved = compose([*TRAINING, *MODELS["gpt2"]]), tmp_path / "base", tmp_path / "adapters"
    make(config.model).save_pretrained(base)
    modules = "transformer.h.1.attn.c_attn", "transformer.h.1.mlp.c_fc"
    lora = peft.LoraConfig(r=4, target_modules=r".*\.h\.1\.(attn\.c_attn|mlp\.c_fc)", task_type="CAUSAL_LM")
    peft.get_peft_model(make(config.model), lora).save_pretrained(saved)
    words = [*OURS, f"checkpoint.base={base}"]
    assert adapted_modules(opened("trainer", saved, words, weights_only=True).model) == modules
    command = ["import", "trainer", str(saved), str(tmp_path / "checkpoints"), "--weights-only", *words]
    assert convert.main(command) == 0
    found = of_checkpoint(open_checkpoint(tmp_path / "checkpoints/iter_0000000", Files()), takes_adapters=True)
    assert adapted_modules(found.model) == modules


# ---- what an import takes, tells and refuses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the Trainer of three steps."""
    folder = tmp_path_factory.mktemp("theirs")
    theirs(compose([*TRAINING, *MODELS["gpt2"]]), folder, lr_scheduler_type="linear").train()
    return folder / f"checkpoint-{SAVED}"


def rewritten(saved: Path, folder: Path, **arguments: Any) -> Path:
    """Return a copy of a checkpoint with other arguments of its Trainer."""
    copy = Path(shutil.copytree(saved, folder / saved.name))
    changed = torch.load(copy / "training_args.bin", weights_only=False)
    for name, value in arguments.items():
        setattr(changed, name, value)
    torch.save(changed, copy / "training_args.bin")
    return copy


TOLD: dict[str, tuple[dict[str, Any], str, str]] = {
    "another schedule": ({"lr_scheduler_type": SchedulerType.INVERSE_SQRT}, "inverse_sqrt", ""),
    "another rate": ({"lr_scheduler_type": SchedulerType.COSINE, "warmup_steps": 1}, "whose next rate", ""),
    "an option": ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "num_cycles", ""),
    "a rise": ({"warmup_steps": 5}, "the warmup rises", "schedule.lr_warmup_iters=6"),
    "a part of the run": ({"warmup_ratio": 0.7, "warmup_steps": 0}, "the warmup", "schedule.lr_warmup_iters=6"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1", "schedule.lr_decay_iters=7"),
    "bfloat16": ({"bf16": True}, "epoch 0.5", "train.dtype=bfloat16"),
    "no clipping": ({"max_grad_norm": None}, "epoch 0.5", "train.clip_grad=0.0"),
    "two ranks": ({"distributed_state": Namespace(num_processes=2)}, "epoch 0.5", "train.global_batch_size=24"),
}


@pytest.mark.parametrize("case", TOLD)
def test_settings_without_a_counterpart_are_told(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    arguments, told, setting = TOLD[case]
    with caplog.at_level("INFO"):
        source = opened("trainer", rewritten(saved, tmp_path, **arguments), OURS)
    assert told in caplog.text
    assert source.consumed_samples == SAVED * (24 if case == "two ranks" else 12)
    assert setting in [*(f"{key}={value}" for key, value in source.settings.items()), ""]
    assert setting or not [key for key in source.settings if key.startswith("schedule")]


def test_the_log_comes_along_and_the_command_goes_first(saved: Path, tmp_path: Path) -> None:
    copy = rewritten(saved, tmp_path)
    state = json.loads((copy / "trainer_state.json").read_text())
    del state["log_history"][1]
    state["log_history"].append({"step": 3, "eval_loss": 4.5, "epoch": 0.5})
    (copy / "trainer_state.json").write_text(json.dumps(state))
    words = [*OURS, "schedule=constant", "schedule.lr_warmup_iters=1", "train.global_batch_size=24"]
    command = ["import", "trainer", str(copy), str(tmp_path / "run/checkpoints"), "--trust-pickle", *words]
    assert convert.main(command) == 0
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(r["iteration"], r.get("event")) for r in records] == [(1, None), (3, "mean"), (3, "evaluation")]
    record = json.loads((tmp_path / f"run/checkpoints/iter_{SAVED:07d}/trainer_state.json").read_text())
    assert (record["schedule"]["style"], record["batch"]["global_batch_size"]) == ("constant", 24)
    assert record["adam"]["beta2"] == 0.9
    assert not [name for name in record["assumed"] if name.startswith(("adam", "schedule", "clip_grad"))]


def edit(name: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda folder: states.replace_file(folder / name, change)


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:200])


def only(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").unlink()
        (folder / name).touch()

    return change


def adapters(**members: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gpt2", **members}))

    return change


def of_deepspeed(folder: Path) -> None:
    (folder / "global_step3").mkdir()
    (folder / "latest").write_text("global_step3")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no moments": (lambda folder: (folder / "optimizer.pt").unlink(), "--weights-only"),
    "a frozen parameter": (edit("optimizer.pt", lambda t: t["param_groups"][1]["params"].pop()), "train.freeze"),
    "another optimizer": (edit("optimizer.pt", lambda t: t["state"][2].pop("exp_avg_sq")), "another optimizer"),
    "adapters of another kind": (adapters(use_dora=True), "use_dora=True"),
    "a base on the hub": (adapters(), "checkpoint.base"),
    "a loop of accelerate": (only("optimizer.bin"), "model.config.save_pretrained"),
    "whole weights of FSDP": (only("pytorch_model_fsdp.bin"), "model.save_pretrained"),
    "ranks of FSDP": (only("pytorch_model_fsdp_0_rank1.bin"), "SHARDED_STATE_DICT"),
    "DeepSpeed": (of_deepspeed, "--input_folder"),
    **{f"a cut {name}": (cut(name), name) for name in ("optimizer.pt", "scheduler.pt", "training_args.bin")},
    "a cut log": (cut("trainer_state.json"), "trainer_state.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(saved: Path, tmp_path: Path, case: str) -> None:
    change, named = REFUSED[case]
    copy = rewritten(saved, tmp_path)
    change(copy)
    with refused(TrainerError, named):
        opened("trainer", copy, OURS)


def test_adapters_without_the_name_of_a_base_take_no_folder(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = rewritten(saved, tmp_path)
    adapters(base_model_name_or_path="")(copy)
    monkeypatch.chdir(saved)  # a model folder
    with refused(TrainerError, "checkpoint.base"):
        opened("trainer", copy, OURS)


def test_moments_by_name_are_those_by_number(saved: Path, tmp_path: Path) -> None:
    source = opened("trainer", saved, OURS)
    shapes = stored_tensors(source.model)
    order = sorted(shapes, key=lambda name: len(shapes[name].shape) < 2)

    def rename(table: Any) -> None:
        table["state"] = {f"_orig_mod.{order[number]}": entry for number, entry in table["state"].items()}

    copy = rewritten(saved, tmp_path)
    edit("optimizer.pt", rename)(copy)
    assert_carried(opened("trainer", copy, OURS), source)


def test_pickles_are_trusted_by_name_alone(saved: Path) -> None:
    with refused(ConfigError, "--trust-pickle"):
        opened("trainer", saved, OURS, trusts_pickle=False)
    assert opened("trainer", saved, OURS, trusts_pickle=False, weights_only=True).iteration == 0


# ---- accelerate, FSDP and DeepSpeed


@pytest.mark.parametrize("groups", [1, 2])
def test_a_loop_of_accelerate_is_carried_bit_for_bit(tmp_path: Path, groups: int) -> None:
    config = compose([*TRAINING, *MODELS["llama tied"]])
    accelerator, model = accelerate.Accelerator(cpu=True), make(config.model)
    adamw = make_adamw(model, config) if groups == 2 else torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, adamw)
    for batch in batches(config)[:SAVED]:
        step(model, optimizer.optimizer, batch)
    accelerator.save_state(str(tmp_path))
    model.config.save_pretrained(tmp_path)
    state = optimizer.optimizer.state
    tensors = {
        f"{key}.{name}" if key else name: value
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter.detach(), **state[parameter]}.items()
    }
    source = opened("trainer", tmp_path, OURS)
    assert_carried(source, StateSource(config.model, SAVED, has_optimizer=True, read=tensors.__getitem__))
    assert source.settings["optimizer.lr"] == 0.01


def fsdp_job(arguments: list[str]) -> None:
    """Train by FSDP2 on each of two ranks, and save as the Trainer has accelerate save."""
    saved, losses = arguments
    config = compose([*TRAINING, *MODELS["gpt2"]])
    accelerator = accelerate.Accelerator(cpu=True)
    data, model = batches(config), sharded(make(config.model))
    optimizer = make_adamw(model, config)
    for batch in data[:SAVED]:
        step(model, optimizer, batch)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, saved)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, saved)
    rest = [step(model, optimizer, batch) for batch in data[SAVED:]]
    if accelerator.is_main_process:
        Path(losses).write_text(json.dumps(rest))
    accelerator.end_training()


@pytest.mark.slow
def test_two_ranks_of_fsdp_go_on_here(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "saved"), str(tmp_path / "losses.json")]
    ended = call_on_ranks(fsdp_job, arguments, folder=tmp_path / "job", ranks=2, timeout_s=120)
    assert ended.ok, ended.text
    words = [*TRAINING, *MODELS["gpt2"]]
    command = ["import", "trainer", arguments[0], str(tmp_path / "run/checkpoints"), "--trust-pickle", *words]
    assert convert.main(command) == 0
    run_ok(tmp_path / "run", words)
    assert_same(losses_of(tmp_path / "run"), json.loads((tmp_path / "losses.json").read_text()))


def test_a_universal_checkpoint_of_the_trainer_is_carried(tmp_path: Path) -> None:
    state = states.state_of("gpt2")
    states.write_universal(tmp_path, state, prefix="module.")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(state.model)))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": SAVED, "log_history": []}))
    assert_carried(opened("trainer", tmp_path, states.ALONE), state)
