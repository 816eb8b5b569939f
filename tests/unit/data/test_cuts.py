"""Tokens of a text, whatever its tokenizer is made of: those of the whole text, however it is read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.normalizers import NFD, NFKC, BertNormalizer, Prepend, Replace, Strip, StripAccents
from tokenizers.pre_tokenizers import (
    BertPreTokenizer,
    CharDelimiterSplit,
    Digits,
    FixedLength,
    Metaspace,
    Punctuation,
    Split,
    UnicodeScripts,
    Whitespace,
    WhitespaceSplit,
)

from tests.messages import Printed
from tests.unit.data.doors import tokens_of
from trainer.commands.prepare_data import main
from trainer.data import text_file
from trainer.data.blocks import SplitOptions, TextForm, read_blocks
from trainer.data.blocks import split as split_sources
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.sources import text_sources
from trainer.data.text import open_encoder, prompt_tokens

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT, _FIRST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"[^\r\n\p{L}\p{N}]?"
GPT4O = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_SHORT}|{_FIRST}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = GPT4O.replace(_SHORT, "").replace("{1,3}", "")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return Split(Regex(pattern), behavior, invert)


def sequence(*members: Any) -> Any:
    return pre_tokenizers.Sequence(list(members))


GPT2_SPLIT, ONE_SPACE = split(GPT2), pre_tokenizers.ByteLevel(False)
NORMALIZERS: dict[str, Any] = {
    "Strip": Strip(),
    "Prepend": Prepend("▁"),
    "Replace over a cut": Replace("n ", "e "),
    "ByteLevel": normalizers.ByteLevel(),
}
PRE_TOKENIZERS: dict[str, Any] = {
    "none": None,
    "ByteLevel with a space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "ByteLevel without words": BYTES,
    "Digits": Digits(),
    "FixedLength": FixedLength(8),
    "UnicodeScripts": UnicodeScripts(),
    "Metaspace always": Metaspace(),
    "scripts, then words": sequence(UnicodeScripts(), GPT2_SPLIT),
    "words with a first": sequence(ONE_SPACE, Metaspace(prepend_scheme="first")),
    "text over a cut": sequence(Split("n ", "isolated"), GPT2_SPLIT),
    "letters alone": split(r"\p{N}{1,3}"),
    "previous": split(GPT2, "merged_with_previous"),
    "words in pieces": sequence(Whitespace(), FixedLength(2), UnicodeScripts()),
}
# In use by models of text, or what keeps the speed of many processes.
CUT_NORMALIZERS: dict[str, Any] = {
    "BertNormalizer": BertNormalizer(),
    **{kind: getattr(normalizers, kind)() for kind in ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt")},
    "StripAccents": normalizers.Sequence([NFD(), StripAccents()]),
}
CUT_PRE_TOKENIZERS: dict[str, Any] = {
    "BertPreTokenizer": BertPreTokenizer(),
    "ByteLevel": ONE_SPACE,
    "Whitespace": Whitespace(),
    "WhitespaceSplit": WhitespaceSplit(),
    "GPT-2": GPT2_SPLIT,
    "GPT-2 inverted": split(GPT2, "removed", invert=True),
    "LLaMA-3": sequence(split(LLAMA3), BYTES),
    "Qwen": sequence(split(QWEN), BYTES),
    "GPT-4o": sequence(split(GPT4O), BYTES),
    "Mistral": sequence(split(MISTRAL), BYTES),
    "DeepSeek": sequence(*map(split, DEEPSEEK), BYTES),
    "Falcon": sequence(Punctuation("contiguous"), ONE_SPACE, Digits(), split("[0-9][0-9][0-9]")),
    "XLM": sequence(WhitespaceSplit(), Metaspace()),
    "delimiters": sequence(CharDelimiterSplit("e"), ONE_SPACE),
}
CUT = {f"normalizer {name}": (normalizer, GPT2_SPLIT) for name, normalizer in CUT_NORMALIZERS.items()}
CUT |= {f"pre_tokenizer {name}": (None, pre_tokenizer) for name, pre_tokenizer in CUT_PRE_TOKENIZERS.items()}
WHOLE = {f"normalizer {name}": (normalizer, GPT2_SPLIT) for name, normalizer in NORMALIZERS.items()}
WHOLE |= {f"pre_tokenizer {name}": (None, pre_tokenizer) for name, pre_tokenizer in PRE_TOKENIZERS.items()}
COMPONENTS = CUT | WHOLE
SETTINGS = ("truncation", "padding", "dropout")
WORDS_OF_TEXT = (
    *"Anna banana it's 1234567 x x=y; e ǅ größe gro\u0308ße ﬁ 東京。 日本語 🙂 ...".split(),  # noqa: SIM905
    *"n an # ß \u0301 \ufb01n \u200b".split(),  # noqa: SIM905
    *("A B", "he re", "ss ", "\u3000"),
)
SPACES = (" ", " ", " ", "  ", "\n", "\n", "\n\n", "\t", "\r\n", " \n ", "")


def text(words: int, seed: int = 0) -> str:
    """Return words and white space in any order, which begin and end with white space."""
    draw = random.Random(seed)
    return " \n" + "".join(draw.choice(WORDS_OF_TEXT) + draw.choice(SPACES) for _ in range(words)) + "x \n"


def tokenizer(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """Return a tokenizer of these components that merges whatever they leave together."""
    made = Tokenizer(models.BPE(unk_token="?"))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "?"], show_progress=False, max_token_length=12
    )
    made.train_from_iterator([text(300, seed=1)], trainer)
    return made


@cache
def trained(name: str) -> str:
    content: str = tokenizer(*COMPONENTS[name]).to_str()
    return content


def written(folder: Path, content: str, settings: Sequence[str] = ()) -> Path:
    """Write a tokenizer with settings that spoil its tokens."""
    made = Tokenizer.from_str(content)
    if "truncation" in settings:
        made.enable_truncation(32)
    if "padding" in settings:
        made.enable_padding(length=4000)
    if "dropout" in settings:
        made.model.dropout = 0.3
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def whole(content: str, text: str) -> list[int]:
    """Return the tokens of a text in one call, without truncation, padding and dropout."""
    ids: list[int] = Tokenizer.from_str(content).encode(text, add_special_tokens=False).ids
    return ids


def prepared(folder: Path, path: Path, block_bytes: int) -> list[int]:
    """Return the tokens that `prepare-data` makes of `text.txt` in blocks of about 1 KiB more than `block_bytes`."""
    options = PrepareOptions(TextForm.text, tokenizer=path)
    with mock.patch.object(text_file, "BLOCK_BYTES", block_bytes):
        shutil.rmtree(folder / "out", ignore_errors=True)
        write_prepared(folder / "out", text_sources(f"{folder}/text.txt"), options, workers=1)
    return tokens_of([folder / "out/train_000000.bin"])


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_gives_the_tokens_of_the_whole(tmp_path: Path, name: str) -> None:
    content, raw, end = trained(name), text(1500), 0
    path, source = written(tmp_path, content, SETTINGS), tmp_path / "text.txt"
    source.write_text(raw, newline="")
    assert prepared(tmp_path, path, 20) == [*whole(content, raw), end]
    assert prompt_tokens(open_encoder(path), raw, 10_000) == (whole(content, raw) or [end])


@pytest.mark.parametrize("name", CUT)
def test_texts_of_tokenizers_in_use_are_cut(tmp_path: Path, name: str) -> None:
    path, source = written(tmp_path, trained(name)), tmp_path / "text.txt"
    source.write_text(text(4000), newline="")
    parts = split_sources(text_sources(str(source)), SplitOptions(TextForm.text))["train"]
    with mock.patch.object(text_file, "BLOCK_BYTES", 1500):
        lengths = [len(block.data) for block in read_blocks(parts, open_encoder(path).cuts)]
    assert sorted(lengths)[len(lengths) // 2] < 2000


def test_settings_are_switched_off_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Printed
) -> None:
    content = trained("pre_tokenizer ByteLevel")
    labels = {open_encoder(written(tmp_path, content)).label}
    assert not caplog.messages
    raw = "\n".join(text(60, seed) for seed in range(40))
    (tmp_path / "text.txt").write_text(raw, newline="")
    for setting in SETTINGS:
        path = written(tmp_path, content, [setting])
        command = [f"{tmp_path}/text.txt", "--output", f"{tmp_path}/{setting}", "--tokenizer", str(path)]
        assert main([*command, "--workers", "2"]) == 0
        assert tokens_of([tmp_path / setting / "train_000000.bin"]) == [*whole(content, raw), 0]
        labels.add(open_encoder(path).label)
        lines = [*caplog.messages, *capfd.readouterr().err.splitlines()]
        assert len([line for line in lines if setting in line]) == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "?"}')
    labels.add(open_encoder(written(tmp_path, content)).label)
    assert len(labels) == 5, "the cache has another name for other tokens"


def test_a_text_without_a_cut_is_encoded_whole(tmp_path: Path) -> None:
    for setting in ("normalizer Prepend", "pre_tokenizer ByteLevel"):
        for raw in ("x \n" * 2000, "x" * 10_000):
            content = trained(setting)
            (tmp_path / "text.txt").write_text(raw)
            assert prepared(tmp_path, written(tmp_path, content), 100) == [*whole(content, raw), 0]


ADDED = {
    "apart": AddedToken("<|b|>", rstrip=True, lstrip=True, single_word=True),
    "white space": AddedToken("  "),
    "a word": AddedToken("an", single_word=True, lstrip=True),
    "over a cut": AddedToken("n x"),
    "special over a cut": AddedToken("n x", special=True),
    "takes what follows": AddedToken("an", rstrip=True),
    "looks at what is before": AddedToken(" an", single_word=True),
    "normalized over a cut": AddedToken("n\u00a0x", normalized=True),
}


@pytest.mark.parametrize("case", ADDED)
def test_an_added_token_is_not_cut(tmp_path: Path, case: str) -> None:
    made = tokenizer(NFKC(), GPT2_SPLIT)
    made.add_tokens([ADDED[case]])
    made.encode_special_tokens = True
    raw = " ".join(f"{text(9, seed)} ban an<|b|>  n x bn\u00a0x ana  n" for seed in range(100))
    (tmp_path / "text.txt").write_text(raw, newline="")
    path = written(tmp_path, made.to_str())
    assert prepared(tmp_path, path, 20) == [*made.encode(raw, add_special_tokens=False).ids, 0]


@pytest.mark.parametrize("name", ["pre_tokenizer FixedLength", "normalizer Strip"])
def test_what_lies_beyond_both_sides_of_a_cut_counts(tmp_path: Path, name: str) -> None:
    raw, path = f"{'ACGT' * 400} {'ACGT' * 400}{' ' * 1500}" * 40 + "x", written(tmp_path, trained(name))
    (tmp_path / "text.txt").write_text(raw, newline="")
    assert prepared(tmp_path, path, 20) == [*whole(trained(name), raw), 0]
