"""Text of any kind reaches the configuration as it is, and every override that Hydra reads keeps its meaning."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from models.config import RopeScaling
from reprise.errors import ConfigError
from trainer.config.compose import compose, compose_values
from trainer.config.overrides import escape, readable, text_value

# Without "???", which OmegaConf takes for a missing value, and the bytes that no argument of a process holds.
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1).filter("???".__ne__)
ODD_TEXT = st.text(st.sampled_from("ab训é1 .'\"\\=,:[]{}()$*?~+-@/#\n\t"), min_size=1, max_size=12).filter("???".__ne__)
PARSER = OverridesParser.create()


def value_of(word: str) -> object:
    """Return the value that Hydra and OmegaConf make of an override."""
    value = PARSER.parse_override(word).value()
    return OmegaConf.to_object(OmegaConf.create({"key": value}))["key"]  # type: ignore[index,call-overload]


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXT, ODD_TEXT))
@example("${oc.env:HOME}")
@example("a\\${x}\\")
@example("null")
@example("1_000")
@example('it\'s a, "b" = [c')
def test_a_printed_value_means_its_text(text: str) -> None:
    assert value_of(f"key={text_value(text)}") == text
    (word,) = shlex.split(shlex.quote(f"key={text_value(text)}"))
    assert value_of(readable([word])[0]) == text


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXT, ODD_TEXT))
@example("{a: 训}")
@example("a,b")
@example("[1, null, 'x']")
@example("'")
def test_what_hydra_reads_stays_and_other_text_is_literal(text: str) -> None:
    word = f"key={text}"
    try:
        PARSER.parse_override(word)
    except HydraException:
        (changed,) = readable([word])
        if "${" not in text and text[0] not in "[{":
            assert value_of(changed) == text
    else:
        assert readable([word]) == [word]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("key=训练一", "训练一"),
        ("key=语料/*", "语料/*"),
        ("key=[语料/a, b c, 'd']", ["语料/a", "b c", "d"]),
        ("key=[{path: 语料/a, weight: 0.7}]", [{"path": "语料/a", "weight": 0.7}]),
        ("key=a=b", "a=b"),
        ("key=it's", "it's"),
    ],
)
def test_text_that_hydra_refuses_is_quoted(word: str, value: object) -> None:
    (quoted,) = readable([word])
    assert value_of(quoted) == value


def test_names_and_paths_of_any_script_need_no_quotes() -> None:
    config = compose(["run.name=训练一", "data=text", "data.path=语料/*", "checkpoint.save=${run.dir}/保存"])
    assert config.run.dir == "runs/训练一"
    assert config.data.path == "语料/*"
    assert config.checkpoint.save == "runs/训练一/保存"
    blend = compose(["data=token_file", "data.train=[{path: 语料/a, weight: 1/3}, {path: b, weight: 2}]"])
    assert blend.data.train == [{"path": "语料/a", "weight": "1/3"}, {"path": "b", "weight": 2}]


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"not valid UTF-8, found run\.name=\\udcff"):
        readable(["run.name=\udcff"])


@settings(max_examples=60, deadline=None)
@given(st.one_of(TEXT, ODD_TEXT))
def test_an_escaped_text_is_never_resolved(text: str) -> None:
    value = {"key": escape([text, {"inner": text}])}
    assert OmegaConf.to_object(OmegaConf.create(value)) == {"key": [text, {"inner": text}]}


@pytest.mark.parametrize("word", ["model.rope_scaling.factor=4", "model.rope_scaling={factor: 4}"])
def test_a_mapping_that_is_null_takes_its_keys_alone(word: str) -> None:
    assert compose(["model=llama3_tiny", word]).model.rope_scaling == RopeScaling(factor=4.0)
    assert compose(["model=llama3_tiny", "model.rope_scaling.high_freq_factor=3", word]).model.rope_scaling == (
        RopeScaling(factor=4.0, high_freq_factor=3.0)
    )
    assert compose(["model=llama3_1b", word]).model.rope_scaling == RopeScaling(factor=4.0)
    assert compose(["model=llama3_tiny", word, "model.rope_scaling=null"]).model.rope_scaling is None
    assert compose(["model=llama3_1b", "model.rope_scaling=null", word]).model.rope_scaling == RopeScaling(factor=4.0)
    assert compose_values({"model.rope_scaling": {"factor": 4.0}}).model.rope_scaling == RopeScaling(factor=4.0)
    with pytest.raises(ConfigError, match=r"Did you mean model\.rope_scaling\.factor"):
        compose(["model=llama3_tiny", word.replace("factor", "fator")])
