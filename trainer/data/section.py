"""The configuration's `data` section and its validation. Reads no files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import Any

from reprise.storage import IS_URL, is_url

# A fraction with more digits than any float takes minutes.
_WEIGHT = re.compile(r"[\d_]{0,400}(\.[\d_]{0,400})?([eE][+-]?\d{1,3})?(/[\d_]{1,400})?")


class DataKind(Enum):
    """Where tokens come from."""

    stdlib = "stdlib"
    text = "text"
    token_file = "token_file"
    megatron = "megatron"
    module = "module"


class SampleCut(Enum):
    """How samples are cut from a file's documents."""

    across_documents = "across_documents"
    per_document = "per_document"


class DataPosition(Enum):
    """Where a source starts after it replaces another in mid-run."""

    run = "run"
    start = "start"


@dataclass
class DataSection:
    """The token source. Keys not used by its kind must stay null.

    Args:
        kind: `stdlib`, the Python standard library's source text; `text`, text files; `token_file`, token files;
            `megatron`, pairs `.bin` and `.idx`; `module`, samples from `factory`.
        factory: With `module`, ``package:function``, which returns samples and their fingerprint for each path in
            `train` and `valid`. Checkpoints do not carry it.
        path: With `text`, a file or glob (``**`` allowed): plain, gzip, Zstandard or Parquet (column ``text``).
        tokenizer: A tokenizer.json or ``bytes``, saved in every checkpoint. With `text` and `stdlib`, null takes the
            tokenizer beside the weights that `checkpoint` starts from, else bytes. A new model with the byte
            vocabulary, as in tiny presets, takes the file's vocabulary. With tokenized files, it names the tokenizer
            that wrote them.
        train: With tokenized files (all kinds but `text` and `stdlib`), a file or glob; with `megatron` also a path
            without ``.bin``. A list ``[{path: A, weight: 0.7}, {path: B, weight: 1/3}]`` blends sources, with
            `data.kind=text` too, then without `data.path`. Weights may have any sum.
        valid: With tokenized files, validation tokens: a path or an ordered list of paths. Null means none.
        position: Where a source starts when it replaces another at a resume: `run`, at the run's consumed samples;
            `start`, at its first sample, once.
        samples: `across_documents` cuts a file into consecutive windows. `per_document` (`megatron`) starts a
            window at each document and pads the document's last window, without targets.
        document_mask: Keep attention and positions within documents, which end at end-of-text tokens or by the index.
        end_of_text: Token ending a document for `document_mask`. Null takes the index, else the tokenizer's token.
        valid_fraction: Fraction held out for validation: complete files for texts, bytes for a single text, else
            documents.
        cache: Folder for prepared token files. Null is the user's cache.
    """

    kind: DataKind = DataKind.stdlib
    factory: str | None = None
    path: str | None = None
    tokenizer: str | None = None
    train: Any = None
    valid: Any = None
    position: DataPosition = DataPosition.run
    samples: SampleCut = SampleCut.across_documents
    document_mask: bool = False
    end_of_text: int | None = None
    valid_fraction: float = 0.05
    cache: str | None = None


# Kinds with tokenized files: their tokenizer is known only if the configuration names it.
TOKEN_KINDS = frozenset({DataKind.token_file, DataKind.megatron, DataKind.module})
_KEYS_OF_KIND = {kind: {"tokenizer", *(("train", "valid") if kind in TOKEN_KINDS else ())} for kind in DataKind}
_KEYS_OF_KIND[DataKind.text].add("path")
_KEYS_OF_KIND[DataKind.module].add("factory")
_NEEDED_KEY = {DataKind.text: "path", **dict.fromkeys(TOKEN_KINDS, "train")}


def sources_of(section: DataSection) -> list[tuple[DataSection, Fraction]]:
    """Return a section and a weight for each training source. The first has all validation data for tokenized files.

    Args:
        section: A section without `problems`.
    """
    if not isinstance(section.train, list):
        return [(section, Fraction(1))]
    sections = []
    for number, entry in enumerate(section.train):
        path, weight = str(entry["path"]), weight_of(entry["weight"])
        assert weight is not None, "problems finds this"
        if section.kind in TOKEN_KINDS:
            source = replace(section, train=path, valid=None if number else section.valid)
        else:
            source = replace(section, path=path, train=None)
        sections.append((source, weight))
    return sections


def valid_paths(section: DataSection) -> list[str]:
    """Return the validation paths for tokenized files."""
    return list(section.valid) if isinstance(section.valid, list) else [section.valid] if section.valid else []


def weight_of(value: object) -> Fraction | None:
    """Return a weight exactly as written in decimal digits or as a fraction, or None if it is not a positive number."""
    text = str(value)  # a float's shortest digits, not its binary value
    if not _WEIGHT.fullmatch(text):
        return None
    try:
        return Fraction(text) or None
    except (ValueError, ZeroDivisionError):
        return None


def problems(section: DataSection) -> Iterator[str]:
    """Return the section's own problems, each as `key=value: reason`. Reads no files."""
    allowed, needed = _KEYS_OF_KIND[section.kind], _NEEDED_KEY.get(section.kind)
    is_blend = needed is not None and isinstance(section.train, list)
    if is_blend:
        allowed, needed = allowed - {"path"} | {"train"}, None
    for key in ("factory", "path", "tokenizer", "train", "valid"):
        value = getattr(section, key)
        if key == needed and not value:
            yield f"data.{key}={value or 'null'}: data.kind={section.kind.value} needs a file or a glob"
        elif key not in allowed and value is not None:
            reason = "data.train lists the sources" if is_blend else f"data.kind={section.kind.value} does not use it"
            yield f"data.{key}={value}: {reason}"
        elif key == "train" and is_blend:
            yield from _blend_problems(value)
        elif key in ("train", "valid") and value is not None:
            yield from _path_problems(key, value)
    is_indexed, masks = section.kind is DataKind.megatron, section.document_mask
    knows_documents = is_indexed or section.end_of_text is not None or section.tokenizer is not None
    if section.kind is DataKind.module and not section.factory:
        yield "data.factory=null: data.kind=module needs package:function"
    if section.samples is SampleCut.per_document and not is_indexed:
        yield ("data.samples=per_document: needs data.kind=megatron, whose index lists the documents")
    if section.end_of_text is not None and not masks:
        yield f"data.end_of_text={section.end_of_text}: needs data.document_mask=true"
    if masks and section.kind is DataKind.module:
        yield "data.document_mask: cannot be used with data.kind=module, whose samples have their own masks"
    elif masks and section.kind in TOKEN_KINDS and not knows_documents:
        yield ("data.document_mask: needs data.end_of_text, or data.tokenizer, whose end of text ends documents")


def _blend_problems(entries: list[object]) -> Iterator[str]:
    """Return the problems in a source list."""
    if not entries:
        yield "data.train=[]: must have a source"
    for number, entry in enumerate(entries):
        name = f"data.train[{number}]"
        if not isinstance(entry, dict) or entry.keys() != {"path", "weight"}:
            yield f"{name}={entry}: must be {{path: PATH, weight: NUMBER}}"
            continue
        yield from _path_problems(f"train[{number}].path", [entry["path"]])
        if weight_of(entry["weight"]) is None:
            yield f"{name}.weight={entry['weight']}: must be a number above 0, or a fraction such as 1/3"


def _path_problems(key: str, value: object) -> Iterator[str]:
    """Return the problems in a path list. A single path is checked with all other configuration paths."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value:
        yield f"data.{key}={value}: must be a path, or a list of paths"
        return
    for path in value:
        if not isinstance(path, str) or not path.strip():
            yield f"data.{key}={path}: must be a path"
        elif is_url(path):
            yield f"data.{key}={path}: {IS_URL}"
