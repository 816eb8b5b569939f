"""The table of what may differ."""

from __future__ import annotations

import pytest

from reprise.errors import MismatchError
from reprise.storage import Json
from tests.messages import refused, says
from trainer.config.checkpoint import Allowed
from trainer.record.resume_rules import Rule, Verdict, differences, settle

TABLE = (
    Rule("model", Verdict.REFUSED),
    Rule("model.dropout", Verdict.LOGGED, says="the curve changes"),
    Rule("topology", Allowed.topology),
    Rule("data", Allowed.data, says="other samples", hint="samples are others"),
    Rule("versions", Verdict.LOGGED, says="bits may differ"),
)
SAVED: Json = {
    "model": {"width": 64, "vocab_size": 257, "dropout": 0.1},
    "topology": {"tp": 1, "dp": 2},
    "data": {"digest": "aa"},
    "versions": {"torch": "2.11"},
    "modelling": 1,
    "seconds": 5,
}


def changed(**fields: object) -> Json:
    return {key: {**value, **fields.get(key, {})} if isinstance(value, dict) else fields.get(key, value)  # type: ignore[dict-item]
            for key, value in SAVED.items()}  # fmt: skip


def test_a_field_without_a_rule_may_differ() -> None:
    assert differences(SAVED, changed(modelling=2, seconds=6), TABLE) == []
    assert settle([], where="x") == []


def test_all_problems_that_no_flag_allows_are_in_one_message() -> None:
    current = changed(
        topology={"tp": 2}, data={"digest": "bb"}, model={"vocab_size": 300, "dropout": 0.0, "experts": 8}
    )
    table = differences(SAVED, current, TABLE)
    added = next(difference for difference in table if difference.field == "model.experts")
    assert (added.saved, added.current) == (None, 8)
    names = [
        "runs/a/iter_0000010",
        "model.vocab_size",
        "257",
        "300",
        "model.experts",
        "parallel.tensor_model_parallel_size",
    ]
    flags = ["checkpoint.override_data=true allows it", "The others need checkpoint.allow=data,topology."]
    with refused(MismatchError, *names, *flags, "data.digest") as caught:
        settle(table, where="runs/a/iter_0000010")
    assert "dropout" not in str(caught.value)
    with refused(MismatchError, *names) as caught:
        settle(table, allowed={Allowed.data}, where="runs/a/iter_0000010")
    assert "data.digest" not in str(caught.value)


def test_what_is_allowed_or_logged_gives_a_line_each() -> None:
    table = differences(SAVED, changed(topology={"tp": 2}, versions={"torch": "2.13"}), TABLE)
    topology, versions = settle(table, allowed={Allowed.topology}, where="x")
    assert topology.startswith("parallel.tensor_model_parallel_size: saved 1, now 2")
    assert versions == "versions.torch: saved 2.11, now 2.13; bits may differ"


@pytest.mark.parametrize("saved", [None, 0])
def test_a_hint_without_a_saved_value_is_left_out(saved: int | None) -> None:
    hint = "decay={saved} extends the run"
    needs_flag = Rule("decay", Allowed.data, hint=hint)
    with refused(MismatchError, "decay", "checkpoint.override_data=true") as caught:
        settle(differences({"decay": saved}, {"decay": 40}, [needs_flag]), where="x")
    logged = Rule("decay", Verdict.LOGGED, says="rates differ", hint=hint)
    (line,) = settle(differences({"decay": saved}, {"decay": 40}, [logged]), where="x")
    says(line)
    for text in (line, str(caught.value)):
        assert ("decay=0 extends the run" in text) == (saved == 0)


def test_the_rule_of_the_longest_path_wins() -> None:
    found = differences(SAVED, changed(model={"dropout": 0.2, "width": 65}), TABLE)
    assert [(d.field, d.rule.verdict) for d in found] == [
        ("model.width", Verdict.REFUSED),
        ("model.dropout", Verdict.LOGGED),
    ]


def test_an_optional_field_is_compared_only_if_both_have_it() -> None:
    table = (*TABLE, Rule("evaluation", Verdict.LOGGED, says="losses are not measured alike", is_optional=True))
    assert differences(SAVED, {**SAVED, "evaluation": {"iters": 4}}, table) == []
    assert differences({**SAVED, "evaluation": {"iters": 4}}, SAVED, table) == []
    found = differences({**SAVED, "evaluation": {"iters": 4}}, {**SAVED, "evaluation": {"iters": 8}}, table)
    assert settle(found, where="x") == ["train.iters: saved 4, now 8; losses are not measured alike"]
