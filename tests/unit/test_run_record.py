"""What a saved state says of the optimizer is compared with the run's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from models.build import build_model
from tests.harness import TINY, compose
from tests.unit.model_samples import QWEN3
from trainer import run_record
from trainer.checkpoint.format.json_file import Json
from trainer.compatibility import Verdict, differences, settle
from trainer.config.schema import OptimizerName, OptimizerSection
from trainer.errors import CheckpointError, MismatchError
from trainer.optim import apply_settings, build_optimizer
from trainer.optimizers import settings_record
from trainer.schedule import DecayStyle, Schedule

CONFIG = compose(["model=gpt2_tiny", *TINY])
CURRENT: Json = {"optimizer": run_record.optimizer_record(CONFIG.model, CONFIG.optimizer)}
BIAS = "transformer.h.1.ln_2.bias"


def found(
    change: Callable[[Any], object], rules: object = run_record.RULES
) -> dict[str, tuple[object, object, Verdict]]:
    saved = copy.deepcopy(CURRENT)
    change(saved)
    table = differences(*run_record.compared(saved, CURRENT), rules)  # type: ignore[arg-type]
    return {d.field: (d.saved, d.current, d.rule.verdict) for d in table}


def swap(saved: Any) -> None:
    first, second = saved["optimizer"]["groups"]
    second["names"].remove(BIAS)
    first["names"].append(BIAS)


def test_another_optimizer_is_refused() -> None:
    changed = found(lambda saved: saved["optimizer"].update(name="SGD"))
    assert changed == {"optimizer.name": ("SGD", "AdamW", Verdict.REFUSED)}


def test_other_decayed_parameters_need_the_scheduler_s_flag() -> None:
    assert found(swap) == {f"optimizer.weight_decay.{BIAS}": (True, False, Verdict.FLAG)}
    saved = copy.deepcopy(CURRENT)
    swap(saved)
    table = differences(*run_record.compared(saved, CURRENT), run_record.RULES)
    with pytest.raises(MismatchError, match=r"override_scheduler=true allows it"):
        settle(table, flags=set(), where="x")
    assert len(settle(table, flags={"checkpoint.override_scheduler"}, where="x")) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: None,
        lambda saved: saved.pop("optimizer"),
        lambda saved: saved["optimizer"].pop("groups"),
        lambda saved: saved["optimizer"].pop("name"),
        lambda saved: saved["optimizer"]["groups"][0].update(weight_decay=0.5),  # how much is in `adam`
        lambda saved: saved["optimizer"]["groups"][0]["names"].append("not.a.parameter"),  # the model is compared
    ],
    ids=["the same", "none", "no groups", "no name", "another amount", "another model"],
)
def test_what_is_optional_or_compared_elsewhere_is_no_difference(change: Callable[[Any], object]) -> None:
    assert found(change) == {}


@pytest.mark.parametrize("groups", [None, 7, [7], [{}], [{"names": 7}], [{"names": [7]}]])
def test_groups_that_are_none_are_refused(groups: object) -> None:
    changed = found(lambda saved: saved["optimizer"].update(groups=groups))
    assert changed["optimizer.groups"][0] == groups
    assert changed["optimizer.groups"][2] is Verdict.REFUSED


def test_a_fine_tuning_run_compares_no_optimizer() -> None:
    rules = run_record.rules_for(compose(["model=gpt2_tiny", "checkpoint.finetune=true"]).checkpoint)
    assert found(lambda saved: saved.update(optimizer=7), rules) == {}


@pytest.mark.parametrize("head_dim", [14.0, True, "14"])
def test_a_head_dim_of_another_type_is_refused(head_dim: object) -> None:
    state = {"model": {**run_record.model_record(QWEN3), "head_dim": head_dim}}
    with pytest.raises(CheckpointError, match=f"head_dim is {head_dim!r}"):
        run_record.saved_model(state, where="x")


def test_a_saved_model_is_the_model_that_was_recorded() -> None:
    assert run_record.saved_model({"model": run_record.model_record(QWEN3)}, where="x") == QWEN3


MUON = OptimizerSection(name=OptimizerName.muon)
SAVED_MUON = replace(MUON, weight_decay=0.2, muon_momentum=0.8, muon_ns_steps=3, muon_match_rms_adamw=False)
SCHEDULE = Schedule(
    style=DecayStyle.cosine.value, lr=1e-3, min_lr=1e-4, warmup_iters=1, decay_iters=9, wsd_decay_iters=0
)


def muon_state(**changes: object) -> Json:
    record: Any = settings_record(SAVED_MUON)
    record["muon"].update(changes)
    return {"schedule": asdict(SCHEDULE), **record}


def test_another_momentum_of_muon_needs_the_scheduler_s_flag() -> None:
    table = differences(settings_record(replace(MUON, muon_momentum=0.8)), settings_record(MUON), run_record.RULES)
    assert [(d.field, d.saved, d.current) for d in table] == [("muon.momentum", 0.8, 0.95)]
    with pytest.raises(MismatchError, match=r"muon\.momentum +saved 0\.8 +current 0\.95"):
        settle(table, flags=set(), where="x")
    (line,) = settle(table, flags={"checkpoint.override_scheduler"}, where="x")
    assert line == "muon.momentum: saved 0.8, now 0.95; the loss curve will differ"


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
