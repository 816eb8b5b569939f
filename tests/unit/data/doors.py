"""The two doors through which a text becomes tokens: `reprise prepare-data`, and `data=text` of a run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.messages import Printed
from trainer.commands.prepare_data import main
from trainer.data.corpus import Corpus, prepare
from trainer.data.section import DataKind, DataSection
from trainer.data.token_file import open_token_file

WORDS = ["checkpoint", "wörter", "日本語。", "it's", "1234567", "...\n\n", "  ", "\t", "\r\n", "🙂", "x=y;", "Zeile\n"]
END = 256


def prose(count: int, seed: int = 0) -> str:
    """Return text with white space, signs and characters of one to four bytes in any order."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def tokens_of(paths: Iterable[Path]) -> list[int]:
    return [token for path in paths for token in open_token_file(path).read().tolist()]


def of_texts(*texts: str | bytes) -> list[int]:
    """Return the bytes of texts with their ends."""
    return [token for text in texts for token in [*(text if isinstance(text, bytes) else text.encode()), END]]


def texts_of(tokens: Iterable[int]) -> list[bytes]:
    """Return the texts of tokens of bytes, each of which has an end."""
    text = "".join(map(chr, tokens))
    assert not text or text.endswith(chr(END))
    return [part.encode("latin-1") for part in text.split(chr(END))[:-1]]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def prepared(folder: Path, *words: object) -> list[int]:
    """Return the tokens that the command makes, of training and then of validation."""
    shutil.rmtree(folder, ignore_errors=True)
    assert main([*map(str, words), "--output", str(folder), "--workers", "1"]) == 0
    return tokens_of(sorted(folder.glob("*.bin")))


def refusal(capsys: Printed, *words: object) -> str:
    """Return what the command says that refuses these words."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


def text_section(path: object, **keys: object) -> DataSection:
    return replace(DataSection(kind=DataKind.text, path=str(path)), **keys)


def corpus_of(folder: Path, path: object, **keys: object) -> Corpus:
    """Return the corpus that a run makes of the texts at a path, in a cache of this folder."""
    return prepare(text_section(path, **keys), cache=folder / "cache")


def sides(folder: Path, path: object, **keys: object) -> list[list[int]]:
    """Return the tokens of both sides of a run."""
    corpus = corpus_of(folder, path, **keys)
    return [tokens_of(corpus.train), tokens_of(corpus.valid)]


def trained(folder: Path, path: object, **keys: object) -> list[int]:
    """Return the tokens of a run, of training and then of validation."""
    train, valid = sides(folder, path, **keys)
    return train + valid
