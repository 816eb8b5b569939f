"""Configurations that cannot run are refused in one message, before anything is built."""

from __future__ import annotations

import functools
import re

import pytest

import trainer.config.checks
from models.config import Family, ModelConfig
from reprise.errors import ConfigError
from trainer.config.checkpoint import CheckpointSection, NewRows
from trainer.config.checks import batch_problems, share_lines, unused_keys, validate, with_micro_batch
from trainer.config.compose import compose
from trainer.config.derived import length_of
from trainer.config.optimizer import OptimizerName
from trainer.config.schema import Config
from trainer.config.train import Dtype
from trainer.data.section import DataKind
from trainer.optim.table import no_decay_names
from trainer.parallel.topology import Topology
from trainer.record.resume_rules import RULES, Verdict, flags_set, rules_for
from trainer.record.run_record import describe
from trainer.schedules.lr import resolve


def config() -> Config:
    """Return a configuration that can run."""
    model = ModelConfig(
        family=Family.gpt2, n_layer=2, n_head=2, n_kv_head=2, n_embd=20, intermediate_size=44, vocab_size=257,
        max_position_embeddings=128, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    return Config(model=model)


def test_the_defaults_can_run() -> None:
    validate(config(), 1)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "train_iters", 0),
        ("train", "global_batch_size", 0),
        ("train", "micro_batch_size", -1),
        ("train", "seq_length", 0),
        ("train", "eval_interval", -1),
        ("train", "exit_interval", -2),
        ("train", "clip_grad", -0.5),
        ("train", "clip_grad", float("nan")),
        ("train", "seq_length", 129),
        ("train", "device", "tpu"),
        ("logging", "log_interval", 0),
        ("parallel", "zero_stage", 4),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "weight_decay", -0.1),
        ("optimizer", "adam_beta1", 1.0),
        ("optimizer", "adam_beta2", -0.1),
        ("optimizer", "adam_eps", float("nan")),
        ("optimizer", "muon_ns_steps", 0),
        ("optimizer", "muon_ns_steps", 100),
        ("optimizer", "muon_momentum", 1.0),
        ("schedule", "lr_warmup_iters", 101),
        ("checkpoint", "save_interval", -1),
        ("checkpoint", "max_checkpoint_keep", -1),
        ("checkpoint", "save_retain_interval", -1),
        ("checkpoint", "save_weights_interval", -1),
        ("checkpoint", "weights_keep", -1),
        ("checkpoint", "file_bytes", 0),
        ("checkpoint", "commit_timeout_s", 0.0),
        ("model", "n_head", 3),
    ],
)
def test_an_impossible_value_is_named_with_its_key(section: str, key: str, value: object) -> None:
    broken = config()
    setattr(getattr(broken, section), key, value)
    with pytest.raises(ConfigError, match=rf"{section}\.{key}={value}"):
        validate(broken, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [("checkpoint", "override_scheduler", True), ("checkpoint", "use_checkpoint_scheduler", True)],
            "exclude each other",
        ),
        ([("checkpoint", "finetune", True)], "needs checkpoint.load=PATH"),
        ([("checkpoint", "ckpt_step", 5), ("checkpoint", "load", "none")], "nothing is loaded"),
        ([("checkpoint", "resize", True)], "resize=True: needs checkpoint.finetune=true"),
        ([("checkpoint", "partial", ["*"])], "needs checkpoint.finetune=true"),
        ([("checkpoint", "save_steps", [4, -1])], "must be iterations of 0 or more"),
        ([("checkpoint", "full_steps", [4, 0])], "must be iterations of 1 or more"),
        (
            [("train", "eval_interval", 5), ("data", "kind", DataKind.token_file), ("data", "train", "x")],
            "needs data.valid",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: list[tuple[str, str, object]], words: str) -> None:
    broken = config()
    for section, key, value in changes:
        setattr(getattr(broken, section), key, value)
    with pytest.raises(ConfigError, match=words):
        validate(broken, 1)


def test_values_of_new_rows_need_a_resize() -> None:
    broken = config()
    broken.checkpoint.new_rows = NewRows.mean
    with pytest.raises(ConfigError, match=r"checkpoint\.new_rows=mean: needs checkpoint\.resize=true"):
        validate(broken, 1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("checkpoint.base", None, "needs the weights beneath the adapters: checkpoint.base=PATH"),
        ("optimizer.name", OptimizerName.muon, "optimizer.name=muon: adapters are trained by adamw"),
        ("train.freeze", ["*.h.0.*"], "model.lora.rank=4 freezes all but the adapters"),
        ("train.compile", True, "model.lora.dropout=0.1: not with train.compile"),
        ("model.lora.target_modules", ["q_proj"], "'q_proj' fits no module"),
        ("model.lora.rank", 0, "checkpoint.base=b: serves adapters only"),
    ],
)
def test_settings_that_do_not_suit_adapters_are_refused(key: str, value: object, words: str) -> None:
    broken = config()
    broken.model.lora.rank, broken.model.lora.dropout, broken.checkpoint.base = 4, 0.1, "b"
    validate(broken, 1)
    *sections, name = key.split(".")
    setattr(functools.reduce(getattr, sections, broken), name, value)
    with pytest.raises(ConfigError, match=re.escape(words)):
        validate(broken, 1)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["transformer.h.7.*"], "'transformer.h.7.*' fits no parameter"),
        (["transformer.wte.weight", "lm_head.*"], "lm_head.weight is tied, name transformer.wte.weight"),
        (["*"], "fits every parameter"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns: list[str], words: str) -> None:
    broken = config()
    broken.train.freeze = patterns
    with pytest.raises(ConfigError, match=re.escape(words)):
        validate(broken, 1)


@pytest.mark.parametrize(("key", "value"), [("save_interval", -1), ("keep", 0), ("copies", -1), ("dir", "c")])
def test_an_impossible_value_of_local_checkpoints_is_named(key: str, value: object) -> None:
    broken = config()
    broken.checkpoint.save = "c"
    setattr(broken.checkpoint.local, key, value)
    with pytest.raises(ConfigError, match=rf"checkpoint\.local\.{key}={value}"):
        validate(broken, 1)


def test_keys_of_local_checkpoints_without_a_folder_are_named() -> None:
    found = config()
    found.checkpoint.local.copies = 2
    (line,) = unused_keys(found)
    assert line == "checkpoint.local.dir is null, so these keys are not used: checkpoint.local.copies=2"
    found.checkpoint.local.dir = "d"
    assert unused_keys(found) == []


def test_a_length_in_iterations_beside_one_in_samples_is_named() -> None:
    found = config()
    found.train.train_samples = 800
    assert unused_keys(found) == []
    found.train.train_iters = 7
    (line,) = unused_keys(found)
    assert line == "train.train_samples=800 is the length of the run, so train.train_iters=7 is not used"


def test_shares_of_ranks_may_differ_except_in_a_pipeline() -> None:
    uneven = config()
    uneven.train.global_batch_size = 12
    assert share_lines(uneven, 1) == []
    validate(uneven, 2)
    (line,) = share_lines(uneven, 2)
    assert line.endswith("micro_batch_size=4: at most 2 on a rank, 1.50 on average")
    with pytest.raises(ConfigError, match=r"batch_size=12: must be at least 16, .*=4 for each of the 4 data"):
        validate(uneven, 4)
    uneven.parallel.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=12: .*=4 times the 2 data-parallel ranks.* of 8"):
        validate(uneven, 4)


@pytest.mark.parametrize(
    ("batch", "most", "ranks", "size"),
    [
        (512, 8, 64, 8),
        (512, 8, 56, 2),
        (512, 8, 32, 8),
        (12, 8, 4, 3),
        (12, 2, 4, 1),
        (7, 4, 3, 1),
        (8, 4, 3, 1),
        (6, 4, 7, 1),
    ],
)
def test_auto_takes_the_evenest_shares_in_the_fewest_passes(batch: int, most: int, ranks: int, size: int) -> None:
    found = config()
    found.train.global_batch_size, found.train.max_micro_batch_size = batch, most
    found.train.micro_batch_size = compose(["train.micro_batch_size=auto"]).train.micro_batch_size
    assert with_micro_batch(found, ranks).train.micro_batch_size == size
    if ranks <= batch:
        validate(found, ranks)


def test_auto_tries_no_size_that_leaves_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = compose(["train.micro_batch_size=auto"]), list[int]()
    found.train.global_batch_size = found.train.max_micro_batch_size = 10_007 * 4

    def recorded(config: Config, world_size: int, consumed_samples: int) -> list[str]:
        tried.append(config.train.micro_batch_size)
        return batch_problems(config, world_size, consumed_samples)

    monkeypatch.setattr(trainer.config.checks, "batch_problems", recorded)
    assert with_micro_batch(found, 2).train.micro_batch_size == 20_014
    assert tried == [1, 2, 4, 10_007, 20_014, 40_028]


def test_no_smaller_micro_batch_is_advised_than_one_sample() -> None:
    found = compose(["train.micro_batch_size=auto", "train.global_batch_size=6"])
    with pytest.raises(ConfigError, match=r"for each of the 7 data-parallel ranks\n"):
        validate(found, 7)


def test_auto_keeps_to_pipelines_lanes_and_schedules() -> None:
    found = compose(["train.micro_batch_size=auto", "train.max_micro_batch_size=8", "train.global_batch_size=16"])
    assert with_micro_batch(found, 2).train.micro_batch_size == 8
    found.parallel.pipeline_model_parallel_size = 2
    assert with_micro_batch(found, 4).train.micro_batch_size == 4
    found.parallel.pipeline_model_parallel_size, found.parallel.invariant_ranks = 1, 8
    assert with_micro_batch(found, 2).train.micro_batch_size == 2
    found.parallel.invariant_ranks, found.train.batch_schedule = 0, "0:4 8:16"
    found.checkpoint.load = "none"
    assert with_micro_batch(found, 2).train.micro_batch_size == 2


def test_all_problems_are_one_message() -> None:
    broken = config()
    broken.train.train_iters, broken.optimizer.lr, broken.model.n_layer = 0, -1.0, 0
    with pytest.raises(ConfigError) as caught:
        validate(broken, 1)
    for key in ("train.train_iters=0", "optimizer.lr=-1.0", "model.n_layer=0", "Nothing was started"):
        assert key in str(caught.value)


def test_the_record_has_a_rule_for_every_field() -> None:
    found = config()
    found.train.dtype = Dtype.bfloat16
    schedule = resolve(found.schedule, length_of(found.train), found.optimizer.lr)
    description = describe(
        found, schedule=schedule, topology=Topology(1, 2, 1), fingerprint="ab", environment={"threads": 1}
    )
    decayed, spared = (group["names"] for group in description["optimizer"]["groups"])
    assert "transformer.wte.weight" in decayed
    assert (
        {"transformer.h.0.ln_1.weight", "transformer.h.1.attn.c_attn.bias"}
        <= set(spared)
        == no_decay_names(found.model)
    )
    spoken_of = {rule.field.split(".")[0] for rule in RULES}
    assert description.keys() <= spoken_of


def test_the_flags_that_are_set_and_the_rules_that_apply() -> None:
    assert flags_set(CheckpointSection()) == set()
    assert flags_set(CheckpointSection(reshard=True, override_data=True)) == {
        "checkpoint.reshard",
        "checkpoint.override_data",
    }
    assert rules_for(CheckpointSection()) == RULES
    assert {rule.field.split(".")[0] for rule in rules_for(CheckpointSection(finetune=True))} == {"model", "base"}
    resized = {rule.field for rule in rules_for(CheckpointSection(finetune=True, resize=True))}
    assert {"model", "model.vocab_size", "model.max_position_embeddings"} < resized
    assert not any(rule.field == "model.vocab_size" for rule in rules_for(CheckpointSection(resize=True)))
    partial = rules_for(CheckpointSection(finetune=True, partial=["*"]))
    assert {rule.verdict for rule in partial} == {Verdict.LOGGED}
    kept = {rule.field.split(".")[0] for rule in rules_for(CheckpointSection(use_checkpoint_scheduler=True))}
    assert not kept & {"schedule", "adam"}
    assert "topology" in kept


def test_every_size_that_the_ranks_cannot_divide_is_named() -> None:
    found = config()
    found.train.micro_batch_size, found.train.global_batch_size = 2, 12
    found.train.batch_schedule = "0:4 8:2 1k:7 24k:12"
    validate(found, world_size=2)  # a resumed run may be past the sizes that its ranks cannot divide
    found.checkpoint.load = "none"
    with pytest.raises(ConfigError) as caught:
        validate(found, world_size=2)
    named = [line.strip() for line in str(caught.value).splitlines() if "train.batch_schedule" in line]
    assert [line.partition(": must be")[0] for line in named] == [
        "train.batch_schedule=8:2",
        "train.batch_schedule=1000:7",
    ]
