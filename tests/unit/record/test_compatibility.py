"""The table of what may differ."""

from __future__ import annotations

import pytest

from reprise.errors import MismatchError
from reprise.json_file import Json
from trainer.record.resume_rules import Rule, Verdict, differences, settle

TABLE = (
    Rule("model", Verdict.REFUSED),
    Rule("model.dropout", Verdict.LOGGED, says="the curve changes"),
    Rule("topology", Verdict.FLAG, flag="checkpoint.reshard"),
    Rule("data", Verdict.FLAG, flag="checkpoint.other_data", says="other samples", hint="samples are others"),
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


def test_equal_states_have_no_differences() -> None:
    assert differences(SAVED, SAVED, TABLE) == []
    assert settle([], flags=(), where="x") == []


def test_a_field_without_a_rule_may_differ() -> None:
    assert differences(SAVED, changed(modelling=2, seconds=6), TABLE) == []


def test_the_line_of_a_logged_difference_ends_with_the_hint() -> None:
    table = (Rule("versions", Verdict.LOGGED, says="bits may differ", hint="version={saved} keeps them"),)
    found = differences(SAVED, changed(versions={"torch": "3"}), table)
    assert settle(found, flags=(), where="x") == [
        "versions.torch: saved 2.11, now 3; bits may differ; version=2.11 keeps them"
    ]
    found = differences(changed(versions={"torch": None}), SAVED, table)
    assert settle(found, flags=(), where="x") == ["versions.torch: saved nothing, now 2.11; bits may differ"]


def test_the_rule_of_the_longest_path_wins() -> None:
    found = differences(SAVED, changed(model={"dropout": 0.2, "width": 65}), TABLE)
    assert [(d.field, d.rule.verdict) for d in found] == [
        ("model.width", Verdict.REFUSED),
        ("model.dropout", Verdict.LOGGED),
    ]


def test_a_field_that_only_one_side_has_is_a_difference() -> None:
    (found,) = differences(SAVED, changed(model={"experts": 8}), TABLE)
    assert (found.field, found.saved, found.current) == ("model.experts", None, 8)
    with pytest.raises(MismatchError, match="saved nothing  current 8"):
        settle([found], flags=(), where="x")


def test_a_refusal_names_field_both_values_and_where() -> None:
    found = differences(SAVED, changed(model={"vocab_size": 300}), TABLE)
    with pytest.raises(MismatchError) as caught:
        settle(found, flags=("checkpoint.reshard",), where="runs/a/iter_0000010")
    assert "runs/a/iter_0000010" in str(caught.value)
    assert "model.vocab_size  saved 257  current 300" in str(caught.value)
    assert "=true" not in str(caught.value)


def test_a_difference_that_a_flag_allows_names_the_flag() -> None:
    found = differences(SAVED, changed(topology={"tp": 2}, data={"digest": "bb"}), TABLE)
    with pytest.raises(MismatchError) as caught:
        settle(found, flags=(), where="x")
    assert "parallel.tensor_model_parallel_size" in str(caught.value)
    assert "samples are others; checkpoint.other_data=true allows it" in str(caught.value)
    assert "set checkpoint.other_data=true checkpoint.reshard=true." in str(caught.value)


def test_all_problems_that_are_not_allowed_are_in_one_message() -> None:
    current = changed(topology={"tp": 2}, data={"digest": "bb"}, model={"width": 1, "dropout": 0.0})
    with pytest.raises(MismatchError) as caught:
        settle(differences(SAVED, current, TABLE), flags=("checkpoint.other_data",), where="x")
    text = str(caught.value)
    assert "model.width" in text
    assert "parallel.tensor_model_parallel_size" in text
    assert "data.digest" not in text
    assert "dropout" not in text
    assert "Use the saved values" in text


def test_what_is_allowed_or_said_gives_a_line_each() -> None:
    found = differences(SAVED, changed(topology={"tp": 2}, versions={"torch": "2.13"}), TABLE)
    lines = settle(found, flags=("checkpoint.reshard",), where="x")
    assert lines[0].startswith("parallel.tensor_model_parallel_size: saved 1, now 2")
    assert lines[1] == "versions.torch: saved 2.11, now 2.13; bits may differ"


def test_a_hint_without_a_saved_value_is_left_out() -> None:
    table = (Rule("decay", Verdict.FLAG, flag="checkpoint.other", hint="decay={saved} extends the run"),)
    for saved, hint in ((None, ""), (0, "decay=0 extends the run; ")):
        found = differences({"decay": saved}, {"decay": 40}, table)
        with pytest.raises(MismatchError) as caught:
            settle(found, flags=(), where="x")
        assert f"current 40  ({hint}checkpoint.other=true allows it)" in str(caught.value)


def test_an_optional_field_is_compared_only_if_both_have_it() -> None:
    table = (*TABLE, Rule("evaluation", Verdict.LOGGED, says="losses are not measured alike", is_optional=True))
    assert differences(SAVED, {**SAVED, "evaluation": {"iters": 4}}, table) == []
    assert differences({**SAVED, "evaluation": {"iters": 4}}, SAVED, table) == []
    found = differences({**SAVED, "evaluation": {"iters": 4}}, {**SAVED, "evaluation": {"iters": 8}}, table)
    assert settle(found, flags=(), where="x") == ["train.iters: saved 4, now 8; losses are not measured alike"]
