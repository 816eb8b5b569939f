"""The record of a run is what its checkpoint is read back by."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from models.build import build_model
from models.config import LoraConfig
from reprise.errors import CheckpointError
from reprise.json_file import Json
from tests.unit.model_samples import QWEN3
from trainer.config.optimizer import OptimizerName, OptimizerSection
from trainer.optim.adamw import apply_settings, build_optimizer
from trainer.optim.table import settings_record
from trainer.record import run_record
from trainer.schedules.lr import DecayStyle, Schedule

MUON = OptimizerSection(name=OptimizerName.muon)


@pytest.mark.parametrize("head_dim", [14.0, True, "14"])
def test_a_head_dim_of_another_type_is_refused(head_dim: object) -> None:
    state = {"model": {**run_record.model_record(QWEN3), "head_dim": head_dim}}
    with pytest.raises(CheckpointError, match=f"head_dim is {head_dim!r}"):
        run_record.saved_model(state, where="x")


def test_a_saved_model_is_the_model_that_was_recorded() -> None:
    assert run_record.saved_model({"model": run_record.model_record(QWEN3)}, where="x") == QWEN3
    adapted = replace(QWEN3, lora=LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj"]))
    assert run_record.saved_model({"model": run_record.model_record(adapted)}, where="x") == adapted
    assert "lora" not in run_record.model_record(QWEN3)


@pytest.mark.parametrize(
    "lora", [3, {"rank": "4"}, {"rank": 4, "other": 1}, {"rank": 4, "target_modules": [1]}, {"rank": -1}]
)
def test_malformed_adapters_in_a_record_are_refused(lora: object) -> None:
    state = {"model": {**run_record.model_record(QWEN3), "lora": lora}}
    with pytest.raises(CheckpointError, match="A state file has"):
        run_record.saved_model(state, where="x")


@pytest.mark.parametrize("patterns", ["transformer.*", [1], {}])
def test_malformed_patterns_of_frozen_names_are_refused(patterns: object) -> None:
    with pytest.raises(CheckpointError, match="no valid patterns"):
        run_record.saved_frozen({"freeze": patterns}, QWEN3, where="x")


SAVED_MUON = replace(MUON, weight_decay=0.2, muon_momentum=0.8, muon_ns_steps=3, muon_match_rms_adamw=False)


SCHEDULE = Schedule(style=DecayStyle.cosine, lr=1e-3, min_lr=1e-4, warmup=1, decay=9, wsd_decay=0)


def muon_state(**changes: object) -> Json:
    record: Any = settings_record(SAVED_MUON)
    record["muon"].update(changes)
    return {"schedule": SCHEDULE.record(), **record}


def test_the_checkpoint_s_settings_of_muon_reach_every_group() -> None:
    schedule, section = run_record.saved_schedule(muon_state(), MUON, where="x")
    assert (schedule, section) == (SCHEDULE, SAVED_MUON)
    model = build_model(QWEN3)
    optimizer = build_optimizer(QWEN3, model, MUON)
    apply_settings(optimizer, QWEN3, model, section)
    matrices, *others = optimizer.param_groups
    settings = {key: matrices[key] for key in ("momentum", "ns_steps", "match_rms_adamw", "weight_decay")}
    assert settings == {"momentum": 0.8, "ns_steps": 3, "match_rms_adamw": False, "weight_decay": 0.2}
    assert sorted(group["weight_decay"] for group in others) == [0.0, 0.2]


@pytest.mark.parametrize(
    ("key", "value"), [("ns_steps", 5.0), ("ns_steps", True), ("match_rms_adamw", 1), ("momentum", -0.1)]
)
def test_a_setting_of_muon_of_another_type_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape(repr(value))):
        run_record.saved_schedule(muon_state(**{key: value}), MUON, where="x")
