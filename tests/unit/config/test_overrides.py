"""Text of any kind reaches the configuration as it is, and every override that Hydra reads keeps its meaning."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from models.config import RopeScaling
from reprise.errors import ConfigError
from tests.messages import refused
from tests.profiles import examples
from trainer.config.compose import compose, read_command, read_resolved, resolve
from trainer.config.overrides import escape, readable, text_value

# Without "???", which OmegaConf takes for a missing value, and the bytes that no argument of a process holds.
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1).filter("???".__ne__)
ODD_TEXT = st.text(st.sampled_from("ab训é1 .'\"\\=,:[]{}()$*?~+-@/#\n\t"), min_size=1, max_size=12).filter("???".__ne__)
PARSER = OverridesParser.create()


def value_of(word: str) -> object:
    """Return the value that Hydra and OmegaConf make of an override."""
    value = PARSER.parse_override(word).value()
    return OmegaConf.to_object(OmegaConf.create({"key": value}))["key"]  # type: ignore[index,call-overload]


@examples(60)
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
    assert value_of(readable([word.replace("key", "data.train", 1)])[0]) == text


@examples(60)
@given(st.one_of(TEXT, ODD_TEXT))
@example("{a: 训}")
@example("a,b")
@example("[1, null, 'x']")
@example("'")
@example("a\\,b")
def test_text_is_literal_under_a_text_key(text: str) -> None:
    (word,) = readable([f"run.name={text}"])
    if "${" not in text and not re.fullmatch(r"""(['"]).*\1""", text, re.DOTALL):
        assert value_of(word) == text


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run.name=训练一", "训练一"),
        ("data.path=语料/*", "语料/*"),
        ("train.freeze=语料.*", ["语料.*"]),
        ("data.train=[语料/a, b c, 'd']", ["语料/a", "b c", "d"]),
        ("data.train=[{path: 语料/a, weight: 0.7}]", [{"path": "语料/a", "weight": 0.7}]),
        ("data.train=[{path: a, weight: 0.12345678901234567890}]", [{"path": "a", "weight": "0.12345678901234567890"}]),
        ("key=[0123, true, 'x', 10]", ["0123", True, "x", 10]),
        ("run.name=a=b", "a=b"),
        ("run.name=it's", "it's"),
        ("run.name='it\\'s'", "it's"),
    ],
)
def test_text_that_hydra_refuses_is_quoted(word: str, value: object) -> None:
    (quoted,) = readable([word])
    assert value_of(quoted) == value


@examples(60)
@given(st.one_of(TEXT, ODD_TEXT))
def test_an_escaped_text_is_never_resolved(text: str) -> None:
    value = {"key": escape([text, {"inner": text}])}
    assert OmegaConf.to_object(OmegaConf.create(value)) == {"key": [text, {"inner": text}]}


@pytest.mark.parametrize("word", ["model.rope_scaling.factor=4", "model.rope_scaling={factor: 4}"])
def test_a_mapping_that_is_null_takes_its_keys_alone(word: str) -> None:
    def scaling(*words: str) -> RopeScaling | None:
        return compose(words).model.rope_scaling

    four = RopeScaling(factor=4.0)
    assert scaling("model=llama3_tiny", word, "model.rope_scaling.high_freq_factor=3") == replace(
        four, high_freq_factor=3.0
    )
    assert scaling("model.rope_scaling.factor=${train.micro_batch_size}") == four
    assert scaling("model=llama3_1b", word) == four
    assert scaling("model=llama3_tiny", word, "model.rope_scaling=null") is None
    assert scaling("model=llama3_1b", "model.rope_scaling=null", word) == four
    assert compose(values={"model.rope_scaling": {"factor": 4.0}}).model.rope_scaling == four
    assert compose([word], {"model.rope_scaling": {"factor": 8.0}}).model.rope_scaling == four
    with refused(ConfigError, "model.rope_scaling.factor"):
        compose(["model=llama3_tiny", word.replace("factor", "fator")])


# Texts that are also numbers, truth values or nothing: commit hashes, dates, versions, words.
NUMBERS = st.from_regex(
    r"[+-]?[0-9]{1,3}(_[0-9]{2})*(\.[0-9]{0,2})?([eE][+-]?[0-9]{1,7})?|0x[0-9a-f]{2}", fullmatch=True
)
WORDS = ("null", "Null", "true", "TRUE", "no", "off", "y", "nan", "-inf", "1:30", "0o17", "2026-11-28")


@examples(60)
@given(NUMBERS)
@example("12e4567")
@example("7e89012")
@example("2026_11_28")
@example("1.50")
@example("0123")
@example("1,2")
@example("choice(a,b)")
def test_a_word_like_a_number_is_the_text_that_was_typed(text: str) -> None:
    keys = ("run.name", "data.train", "+checkpoint.local.dir")
    assert [value_of(word) for word in readable([f"{key}={text}" for key in keys])] == [text] * 3


@pytest.mark.parametrize("text", WORDS)
def test_a_word_for_a_value_is_text_under_a_text_key(text: str) -> None:
    name, save = (value_of(word) for word in readable([f"run.name={text}", f"checkpoint.save={text}"]))
    assert (str(name), save) == (text, None if text.lower() == "null" else text)


@pytest.mark.parametrize("text", ["12e4567", "1.50", "true", "null"])
def test_a_printed_configuration_is_the_one_that_is_read(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain: {seed: 1_000, clip_grad: 1.50}\n")
    words = ["--config-dir", str(tmp_path), "experiment=mine", f"run.name={text}", f"train.freeze=['{text}']"]
    command = read_command(words)
    assert command is not None
    resolved = resolve(command.compose())
    config = resolved.config
    assert (config.run.name, config.run.dir, config.train.freeze) == (text, f"runs/{text}", [text])
    assert (config.train.seed, config.train.clip_grad) == (1000, 1.5)

    (tmp_path / "config.yaml").write_text(resolved.text)
    assert compose(values={f"run.{key}": value for key, value in asdict(config.run).items()}).run == config.run

    assert read_command([*words, "--cfg", "job"]) is None
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out), resolve=True)
    assert read_resolved(tmp_path / "config.yaml")[0] == printed


def test_help_is_printed_and_missing_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_command(["--help", "train.seed=7"]) is None
    assert "reprise options" in capsys.readouterr().out
    with refused(ConfigError, f"{tmp_path}/none"):
        read_command(["--config-dir", f"{tmp_path}/none"])


def test_every_problem_is_found_beside_a_group_that_is_wrong() -> None:
    words = ["experiment=dmo", "train.train_itres=1", "train.lr=fast", "model.foo=1", "train.seed=x", "x" * 300]
    names = ("experiment=demo", "train.train_iters", "optimizer.lr", "model.foo", "train.seed", "x" * 99)
    with refused(ConfigError, *names) as caught:
        compose([*words, "train.threads=1"])
    assert "train.threads" not in str(caught.value)
