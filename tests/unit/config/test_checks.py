"""Configurations that cannot run are refused in one message, before anything is built."""

from __future__ import annotations

import pytest

from models.config import Family, ModelConfig
from reprise.errors import ConfigError
from tests.messages import refused
from trainer.config.checkpoint import Allowed, CheckpointSection
from trainer.config.checks import validate, with_micro_batch
from trainer.config.compose import compose
from trainer.config.dtype import Dtype
from trainer.config.schema import Config
from trainer.optim.table import no_decay_names
from trainer.parallel.topology import Topology
from trainer.record.resume_rules import RULES, rules_for
from trainer.record.run_record import describe


def config() -> Config:
    """Return a configuration that can run."""
    model = ModelConfig(
        family=Family.gpt2, n_layer=2, n_head=2, n_kv_head=2, n_embd=20, intermediate_size=44, vocab_size=257,
        max_position_embeddings=128, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    return Config(model=model)


def test_shares_of_ranks_may_differ_except_in_a_pipeline() -> None:
    uneven = config()
    uneven.train.global_batch_size = 12
    validate(uneven, 2)
    for stages in (1, 2):
        uneven.parallel.pipeline_model_parallel_size = stages
        with refused(ConfigError, "train.global_batch_size=12"):
            validate(uneven, 4)
    uneven.parallel.pipeline_model_parallel_size, uneven.train.micro_batch_size = 1, 2
    uneven.train.batch_schedule = "0:4 8:2 1k:7 24k:12"
    validate(uneven, 2)  # a resumed run may be past the sizes that its ranks cannot divide


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


def test_the_record_has_a_rule_for_every_field() -> None:
    found = config()
    found.train.dtype = Dtype.bfloat16
    schedule = found.learning_rates
    description = describe(
        found, schedule=schedule, topology=Topology(1, 2, 1), data={"fingerprint": "ab"}, environment={"threads": 1}
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
    assert CheckpointSection().allowed == set()
    assert CheckpointSection(reshard=True, override_data=True).allowed == {Allowed.topology, Allowed.data}
    assert CheckpointSection(allow=[Allowed.dtype], reshard=True).allowed == {Allowed.dtype, Allowed.topology}
    named = {rule.verdict for rule in RULES if isinstance(rule.verdict, Allowed)}
    assert CheckpointSection(allow=[Allowed.all]).allowed == named == {*Allowed} - {Allowed.all}
    assert rules_for(CheckpointSection()) == RULES
    assert {rule.field.split(".")[0] for rule in rules_for(CheckpointSection(finetune=True))} == {"model", "base"}
    resized = {rule.field for rule in rules_for(CheckpointSection(finetune=True, resize=True))}
    assert {"model", "model.vocab_size", "model.max_position_embeddings"} < resized
    assert not any(rule.field == "model.vocab_size" for rule in rules_for(CheckpointSection(resize=True)))
