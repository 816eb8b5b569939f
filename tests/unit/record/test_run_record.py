"""The record of a run is what its checkpoint is read back by, and has the keys that change numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest

from models.build import build_model
from models.config import LoraConfig
from reprise.errors import CheckpointError
from reprise.storage import Json
from tests.harness import TINY, compose
from tests.messages import refused
from tests.unit.model_samples import QWEN3
from trainer.config.optimizer import OptimizerName, OptimizerSection
from trainer.config.schema import Config
from trainer.optim.build import build_optimizer
from trainer.optim.table import settings_record
from trainer.record import run_record
from trainer.schedules.lr import DecayStyle, Schedule

MUON = OptimizerSection(name=OptimizerName.muon)

SECTIONS = ("model", "train", "optimizer", "schedule", "parallel")
# Runs in which each key of these sections has its effect, if it has one.
RUNS: tuple[tuple[str, ...], ...] = (
    (),
    ("schedule=wsd", "train.train_iters=100"),
    ("train.train_samples=1600",),
    ("train.train_samples=1600", "schedule=wsd"),
    ("optimizer=muon",),
    ("model.lora.rank=2",),
    ("model=llama3_1b",),
    ("train.eval_interval=2",),
)
# In the record's environment; with the same bits by a test; at a fault alone; or of one launch.
UNRECORDED = {
    "train.compile", "train.deterministic", "train.device", "train.threads",
    "train.activation_checkpointing", "train.max_micro_batch_size",
    "train.on_nonfinite", "train.on_spike", "train.spike_factor", "train.spike_window", "train.max_rewinds",
    "train.distributed_timeout_minutes",
    "train.exit_interval", "train.exit_duration_in_mins",
    "train.profile_steps", "train.dry_run", "train.dry_run_ranks",
}  # fmt: skip
VALUES = {"train.batch_schedule": "0:16 1k:32", "train.skip_samples": ["1-2"], "train.train_samples": 3200}


def test_a_saved_model_is_the_model_that_was_recorded() -> None:
    assert run_record.saved_model({"model": run_record.model_record(QWEN3)}, where="x") == QWEN3
    adapted = replace(QWEN3, lora=LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj"]))
    assert run_record.saved_model({"model": run_record.model_record(adapted)}, where="x") == adapted
    assert "lora" not in run_record.model_record(QWEN3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", "14"), ("lora", 3), ("lora", {"rank": 4, "other": 1}), ("lora", {"rank": -1}),
    ],
)  # fmt: skip
def test_a_malformed_model_of_a_record_is_refused(key: str, value: object) -> None:
    with refused(CheckpointError, "x"):
        run_record.saved_model({"model": {**run_record.model_record(QWEN3), key: value}}, where="x")


@pytest.mark.parametrize("optimizer", [7, {"moments_dtype": "float16"}, {"moments_dtype": [1]}])
def test_a_malformed_dtype_of_moments_is_refused(optimizer: object) -> None:
    with refused(CheckpointError, "x"):
        run_record.saved_moments({"optimizer": optimizer}, where="x")


SAVED_MUON = replace(MUON, weight_decay=0.2, muon_momentum=0.8, muon_ns_steps=3, muon_match_rms_adamw=False)


SCHEDULE = Schedule(style=DecayStyle.cosine, lr=1e-3, min_lr=1e-4, warmup=1, decay=9, wsd_decay=0)


def muon_state(**changes: object) -> Json:
    record: Any = settings_record(SAVED_MUON)
    record["muon"].update(changes)
    return {"schedule": SCHEDULE.record(), **record}


def test_settings_of_muon_are_read_back_and_reach_every_group() -> None:
    schedule, section = run_record.saved_schedule(muon_state(), MUON, where="x")
    assert (schedule, section) == (SCHEDULE, SAVED_MUON)
    matrices, *others = build_optimizer(QWEN3, build_model(QWEN3), section).param_groups
    settings = {key: matrices[key] for key in ("momentum", "ns_steps", "match_rms_adamw", "weight_decay")}
    assert settings == {"momentum": 0.8, "ns_steps": 3, "match_rms_adamw": False, "weight_decay": 0.2}
    assert sorted(group["weight_decay"] for group in others) == [0.0, 0.2]


@pytest.mark.parametrize(
    ("key", "value"), [("ns_steps", 5.0), ("ns_steps", True), ("match_rms_adamw", 1), ("momentum", -0.1)]
)
def test_a_setting_of_muon_of_another_type_is_refused(key: str, value: object) -> None:
    with refused(CheckpointError, repr(value)):
        run_record.saved_schedule(muon_state(**{key: value}), MUON, where="x")


def record_of(config: Config) -> object:
    schedule = config.learning_rates
    topology = config.parallel.topology(8)
    return run_record.describe(config, schedule=schedule, topology=topology, data={}, environment={})


def another(value: Any, kinds: tuple[Any, ...]) -> object:
    """Return another value of the type of a key."""
    match value:
        case bool():
            return not value
        case Enum():
            return next(member for member in type(value) if member is not value)
        case int() | float():
            return value * 2 or 2
        case str():
            return f"{value}1"
        case list():
            return ["transformer.h.0.*"]
    kind = next(kind for kind in kinds if kind is not type(None))
    return kind() if is_dataclass(kind) else 7 if kind is int else ["c_attn"]


def changes(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each key of a section, and the section with another value of it."""
    hints = get_type_hints(type(section))
    for field in fields(section):
        key, value = f"{prefix}.{field.name}", getattr(section, field.name)
        if is_dataclass(value):
            yield from ((name, replace(section, **{field.name: nested})) for name, nested in changes(value, key))
        else:
            kinds = get_args(hints[field.name]) or (hints[field.name],)
            yield key, replace(section, **{field.name: VALUES.get(key, another(value, kinds))})


def test_a_key_that_changes_numbers_is_in_the_record() -> None:
    seen, recorded = set[str](), set[str]()
    for overrides in RUNS:
        config = compose(["model=gpt2_tiny", *TINY, "train.global_batch_size=16", *overrides])
        record = record_of(config)
        for name in SECTIONS:
            for key, section in changes(getattr(config, name), name):
                seen.add(key)
                if record_of(replace(config, **{name: section})) != record:
                    recorded.add(key)
    assert seen - recorded == UNRECORDED
