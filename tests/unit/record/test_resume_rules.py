"""The record of a checkpoint is compared with the run's, by one rule for each member."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from reprise.errors import CheckpointError, MismatchError
from reprise.storage import Json
from tests.harness import TINY, compose
from tests.messages import refused
from trainer.config.checkpoint import Allowed
from trainer.config.saved import flattened
from trainer.config.schema import Config, key_types
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import (
    RULES,
    Difference,
    Verdict,
    compared,
    differences,
    in_samples_of,
    key_of,
    rule_for,
    settle,
)
from trainer.record.run_record import saved_progress
from trainer.schedules.progress import Progress

CONFIG = compose(["model=gpt2_tiny", *TINY])
CURRENT: Json = {
    "batch": {"seq_length": 16},
    "optimizer": run_record.optimizer_record(CONFIG.model, CONFIG.optimizer),
}
BIAS = "transformer.h.1.ln_2.bias"


def found(
    change: Callable[[Any], object], rules: object = resume_rules.RULES
) -> dict[str, tuple[object, object, Verdict | Allowed]]:
    saved = copy.deepcopy(CURRENT)
    change(saved)
    table = differences(*compared(saved, CURRENT, where="x"), rules)  # type: ignore[arg-type]
    return {d.field: (d.saved, d.current, d.rule.verdict) for d in table}


def swap(saved: Any) -> None:
    first, second = saved["optimizer"]["groups"]
    second["names"].remove(BIAS)
    first["names"].append(BIAS)


def test_other_decayed_parameters_need_the_scheduler_s_flag() -> None:
    changed = found(lambda saved: saved["optimizer"].update(name="SGD"))
    assert changed == {"optimizer.name": ("SGD", "AdamW", Verdict.REFUSED)}
    assert found(swap) == {f"optimizer.weight_decay.{BIAS}": (True, False, Allowed.lr)}
    rules = resume_rules.rules_for(compose(["model=gpt2_tiny", "checkpoint.finetune=true"]).checkpoint)
    assert found(swap, rules) == {}
    saved = copy.deepcopy(CURRENT)
    swap(saved)
    table = differences(*compared(saved, CURRENT, where="x"), resume_rules.RULES)
    with refused(MismatchError, "checkpoint.override_scheduler=true"):
        settle(table, where="x")
    assert len(settle(table, allowed={Allowed.lr}, where="x")) == 1


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


def test_moments_without_a_dtype_are_float32() -> None:
    new = description("optimizer.moments_dtype=bfloat16")
    for saved in ({**new, "optimizer": {}}, description()):
        (found,) = differences(*compared(saved, new, where="x"), RULES)
        assert (found.field, found.saved, found.current) == ("optimizer.moments_dtype", "float32", "bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": 7}, {"optimizer": {"groups": [{}]}}, {"topology": 7}, {"schedule": 7}, {"batch": 3},
        {"batch": {"seq_length": "16"}}, {"batch": {"seq_length": 32, "batch_schedule": "x"}},
        {"batch": {"seq_length": 32}, "schedule": {"decay_samples": "60"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_record_is_refused(change: Json) -> None:
    with refused(CheckpointError, "x"):
        compared({**CURRENT, **change}, CURRENT, where="x")


PROCESSOR: Json = {"name": "AMD EPYC", "instructions": "avx avx2", "caches": "l1d 32768"}
MATH: Json = {"kernels": "AVX2", "mkl": "2024.2", "onednn": "v3.12.0", "settings": "", "float32_products": "highest"}
CPU: Json = {
    "device": "cpu", "threads": 2, "torch": "2.13", "compile": False, "processor": PROCESSOR, "math": MATH,
}  # fmt: skip


@cache
def configuration(*overrides: str) -> Config:
    """Return the configuration of a run of eight micro batches an iteration, which no test changes."""
    return compose(["model=gpt2_tiny", *TINY, "train.global_batch_size=16", *overrides])


def description(*overrides: str, ranks: int = 1, environment: Json = CPU) -> Json:
    """Return the record of a run of eight micro batches an iteration."""
    run = configuration(*overrides)
    schedule = run.learning_rates
    topology = run.parallel.topology(ranks)
    data = {"fingerprint": "ab", "valid_fingerprint": "cd"}
    return run_record.describe(run, schedule=schedule, topology=topology, data=data, environment=environment)


def effects(saved: Json, current: Json) -> dict[str, Difference]:
    states = compared(saved, current, where="x")
    return {d.field: d for d in resume_rules.with_same_bits(differences(*states, RULES), *states)}


LANES = "parallel.invariant_ranks=4"
SHARDS = "parallel.invariant_tensor_ranks=2 model.pad_vocab_multiple=2"
SAME = "weights and moments stay bitwise, and so does the loss curve: same bits"
ROUNDING = "weights and moments stay bitwise, the loss curve equals within rounding"
MASKS = f"{ROUNDING}, except that dropout draws other masks"


@pytest.mark.parametrize(
    ("first", "second", "ranks", "fields"),
    [
        ("", "", (1, 4), "dp world_size"),
        ("", "parallel=zero3", (1, 1), "zero_stage"),
        ("", "parallel=ddp", (1, 4), "dp world_size zero_stage"),
        ("", "parallel=pp2_vpp2", (1, 4), "pp vpp dp world_size"),
        (
            "",
            "parallel=zero3 model.initializer_range=0.5 train.eval_interval=5",
            (1, 2),
            "dp world_size zero_stage",
        ),
        ("parallel=tp2_sp", "parallel=tp2_sp parallel.zero_stage=3", (2, 8), "dp world_size zero_stage"),
        (SHARDS, f"{SHARDS} parallel=tp2", (1, 2), "tp world_size"),
        (SHARDS, f"{SHARDS} parallel=tp2_sp parallel.zero_stage=3", (1, 4), "tp sp dp world_size zero_stage"),
    ],
)
def test_another_topology_keeps_the_bits_with_invariant_ranks(
    first: str, second: str, ranks: tuple[int, int], fields: str
) -> None:
    saved = description(LANES, *first.split(), ranks=ranks[0])
    current = description(LANES, *second.split(), ranks=ranks[1])
    for changed in (effects(saved, current), effects(current, saved)):
        shown = {d.field.removeprefix("topology."): d.rule for d in changed.values() if d.field.startswith("topology.")}
        assert shown.keys() == {*fields.split()}
        assert {(rule.says, rule.verdict, rule.hint) for rule in shown.values()} == {
            (SAME, Allowed.topology, "same bits")
        }
    if SHARDS not in first:
        without = effects(description(*first.split(), ranks=ranks[0]), description(*second.split(), ranks=ranks[1]))
        assert {d.rule.says for d in without.values() if d.field.startswith("topology.")} == {ROUNDING}


OTHER_ENVIRONMENTS: list[Json] = [
    {**CPU, "threads": 1},
    {**CPU, "torch": "3"},
    {**CPU, "compile": True},
    {**CPU, "device": "NVIDIA H100"},
    {**CPU, "processor": {**PROCESSOR, "instructions": "avx"}},
    {**CPU, "math": {**MATH, "kernels": "DEFAULT"}},
    {**CPU, "math": {**MATH, "settings": "MKL_CBWR=COMPATIBLE"}},
]
OTHER_KEYS = [
    "parallel.invariant_ranks=8", "parallel.invariant_ranks=0", "train.micro_batch_size=1", "train.dtype=bfloat16",
    "model.dropout=0.2", "model.pad_vocab_multiple=64", "train.global_batch_size=32", "train.seed=5",
    "train.clip_grad=0.5", "optimizer.lr=0.002",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [*(([word], CPU) for word in OTHER_KEYS), *(([], other) for other in OTHER_ENVIRONMENTS)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_difference_leaves_the_curve_within_rounding(overrides: list[str], environment: Json) -> None:
    saved, current = description(LANES), description(LANES, *overrides, ranks=2, environment=environment)
    changed = effects(saved, current)
    assert changed["topology.dp"].rule.says == changed["topology.world_size"].rule.says == ROUNDING
    device: Json = {**CPU, "device": "NVIDIA H100"}  # which is promised no bits
    states = (description(LANES, ranks=ranks, environment=device) for ranks in (1, 2))
    assert effects(*states)["topology.dp"].rule.says == ROUNDING


def test_ranks_on_different_machines_are_promised_no_bits() -> None:
    mixed: Json = {**CPU, "math": {**MATH, "kernels": ["AVX512", "AVX2"]}}
    states = [description(LANES, f"parallel.zero_stage={stage}", ranks=2, environment=mixed) for stage in (1, 3)]
    changed = effects(*states)
    assert {field: d.rule.says for field, d in changed.items()} == {"topology.zero_stage": ROUNDING}
    assert effects(states[0], states[0]) == {}


@pytest.mark.parametrize("member", ["processor", "math", "precision", "micro_batch_size"])
def test_a_record_that_does_not_say_all_is_promised_no_bits(member: str) -> None:
    """Older checkpoints lack members; a resume at the same topology says nothing of them."""
    saved: Any = copy.deepcopy(description(LANES))
    for table in (saved, saved["environment"], saved["batch"]):
        table.pop(member, None)
    assert effects(saved, description(LANES)) == {}
    assert effects(saved, description(LANES, ranks=2))["topology.dp"].rule.says == ROUNDING


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [LANES, "model.lora.rank=2", "model.activation=gelu", "train.freeze=[transformer.h.0.*]"],
        ["optimizer=muon", "train.batch_schedule='0:8 4k:16'", "train.train_samples=40000", "train.eval_interval=2"],
        ["data.samples=per_document"],
    ],
)
def test_every_member_of_the_record_has_a_rule(overrides: list[str]) -> None:
    """All but the progress and the rate, which are not compared."""
    record = Progress().state_record(1e-3, description(*overrides))
    fields = flattened(record).keys() - Progress().record().keys() - {"format", "lr"}
    assert [field for field in fields if rule_for(field, resume_rules.RULES) is None] == []


VIRTUAL, RANKS = "topology.invariant_tensor_ranks", "topology.invariant_ranks"
ORDER = f"{ROUNDING}: gradients are added in another order"


@pytest.mark.parametrize("lanes", ["", LANES])
@pytest.mark.parametrize(
    ("first", "second", "ranks", "expected"),
    [
        ("", "parallel=tp2", (1, 4), {"topology.tp": MASKS, "topology.dp": ROUNDING, "topology.world_size": ROUNDING}),
        ("parallel=tp2", "parallel=tp2_sp", (2, 2), {"topology.sp": MASKS}),
        ("", "train.micro_batch_size=1", (1, 1), {"batch.micro_batch_size": MASKS}),
        ("", "model.pad_vocab_multiple=2", (1, 1), {"model.pad_vocab_multiple": ROUNDING}),
        ("model.pad_vocab_multiple=2", SHARDS, (1, 1), {VIRTUAL: MASKS}),
        ("", "parallel.invariant_ranks=8", (1, 1), {RANKS: ORDER}),
    ],
)
def test_these_keys_change_masks_or_rounding(
    lanes: str, first: str, second: str, ranks: tuple[int, int], expected: dict[str, str]
) -> None:
    states = [description(*lanes.split(), *f.split(), ranks=n) for f, n in zip((first, second), ranks, strict=True)]
    for saved, current in (states, states[::-1]):
        changed = effects(saved, current)
        assert {d.field: d.rule.says for d in changed.values()} == expected
        verdict = Verdict.LOGGED if expected.keys() <= {RANKS, "model.pad_vocab_multiple"} else Allowed.topology
        assert {d.rule.verdict for d in changed.values()} == {verdict}


def test_all_problems_that_no_flag_allows_are_in_one_message() -> None:
    words = ["model.n_layer=3", "parallel=tp2", "train.seed=7", "model.initializer_range=0.5"]
    table = list(effects(description(), description(*words, ranks=2)).values())
    names = ["here", "model.n_layer  ", "saved 2  current 3", "parallel.tensor_model_parallel_size"]
    others = "The others need checkpoint.allow=data,topology."
    with refused(MismatchError, *names, "checkpoint.override_data=true allows it", others) as caught:
        settle(table, where="here")
    assert "initializer_range" not in str(caught.value)
    with refused(MismatchError, *names, others) as caught:
        settle(table, where="here", allowed={Allowed.data})
    assert "train.seed" not in str(caught.value)
    flagged = [d for d in table if isinstance(d.rule.verdict, Allowed)]
    with refused(MismatchError, "To continue anyway, set checkpoint.allow=data,topology."):
        settle(flagged, where="here", allowed={Allowed.data})
    lines = settle(flagged, where="here", allowed={Allowed.data, Allowed.topology})
    assert f"parallel.tensor_model_parallel_size: saved 1, now 2; {MASKS}" in lines


@pytest.mark.parametrize("saved", [None, 0])
def test_a_hint_without_a_saved_value_is_left_out(saved: int | None) -> None:
    states: Any = ({"schedule": {"decay_iters": n}, "environment": {"threads": n}} for n in (saved, 40))
    decay, threads = differences(*states, RULES)
    with refused(MismatchError, "schedule.lr_decay_iters", "checkpoint.override_scheduler=true") as caught:
        settle([decay], where="x")
    (line,) = settle([threads], where="x")
    assert line.startswith(f"train.threads: saved {'nothing' if saved is None else saved}, now 40; ")
    assert ("train.threads=0 keeps" in line) == ("lr_decay_iters=0 keeps" in str(caught.value)) == (saved == 0)


def test_a_schedule_of_one_size_is_no_schedule() -> None:
    assert description("train.batch_schedule=0:16") == description()
    changed = description("train.batch_schedule='0:8 4k:16'")
    assert changed["batch"]["batch_schedule"] == "0:8 4000:16"
    (found,) = effects(description(), changed).values()
    assert (found.field, found.rule.verdict) == ("batch.batch_schedule", Allowed.batch)


def test_a_record_without_invariant_ranks_has_none() -> None:
    older = description()
    assert effects(older, description()) == {}
    assert effects(older, description(LANES)).keys() == {"topology.invariant_ranks"}
    without: Any = copy.deepcopy(older)
    del without["topology"]
    assert "topology.invariant_ranks" not in effects(without, description())
    assert {"topology.dp", "topology.tp"} <= effects(without, description()).keys()


def state(schedule: object, **batch: object) -> Any:
    return {"iteration": 3, "schedule": schedule, "batch": {"seq_length": 16, **batch}}


def test_samples_are_converted_and_iterations_are_not() -> None:
    saved = state({"style": "cosine", "lr": 1.0, "warmup_samples": 5, "decay_samples": 60}, batch_schedule="0:4 13:8")
    found = in_samples_of(32, saved)
    assert found["schedule"] == {"style": "cosine", "lr": 1.0, "warmup_samples": 2, "decay_samples": 30}
    assert found["batch"] == {"seq_length": 16, "batch_schedule": "0:4 6:8"}
    assert in_samples_of(16, saved) is saved
    saved = state({"warmup_iters": 5, "decay_iters": 60}, global_batch_size=8)
    assert in_samples_of(8, saved) == saved


def test_an_evaluation_is_owed_at_another_length_too() -> None:
    progress = Progress(3, 10, 160, best_loss=2.0, owes_evaluation=True)
    saved = {**progress.record(), "batch": {"seq_length": 16}}
    found = saved_progress(saved, seq_length=32, where="here")
    assert found == Progress(3, 5, 160, best_loss=2.0, owes_evaluation=True)


def test_a_run_of_another_length_is_compared_in_its_own_samples() -> None:
    saved = state({"decay_samples": 60}, batch_schedule="0:4 12:8")
    current = {
        "optimizer": {},
        "schedule": {"decay_samples": 30},
        "batch": {"seq_length": 32, "batch_schedule": "0:4 6:8"},
    }
    (found,) = differences(*compared(saved, current, where="x"), RULES)
    assert (found.field, found.saved, found.current) == ("batch.seq_length", 16, 32)


def test_a_constant_rate_has_no_other_end() -> None:
    constant = "schedule.lr_decay_style=constant"
    before, after = (description(constant, f"train.train_iters={iters}") for iters in (10, 20))
    assert before["schedule"] != after["schedule"]
    assert differences(*compared(before, after, where="x"), RULES) == []
    (lr,) = differences(*compared(before, description(constant, "optimizer.lr=0.5"), where="x"), RULES)
    assert key_of(lr.field) == "optimizer.lr"


def test_each_key_of_a_difference_is_one_of_the_configuration() -> None:
    fields = flattened(
        description("data=token_file", "data.train=x", *LANES.split(), "train.freeze=[a]", "optimizer=muon")
    )
    named = {key_of(field) for field in fields if key_of(field) != field}
    assert named <= key_types().keys()
    assert {"optimizer.lr", "train.seq_length", "train.dtype", "optimizer.muon_momentum"} <= named
