"""The section `data` of a configuration, and its validation. Reads no files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import Any

from reprise.storage import is_url, url_problem

MOST_SOURCES = 4096  # of a blend
_MOST_DIGITS = 400  # of a weight, which a float has at most


class DataKind(Enum):
    """The source of tokens."""

    stdlib = "stdlib"
    text = "text"
    token_file = "token_file"
    megatron = "megatron"
    datatrove = "datatrove"
    module = "module"


class SampleCut(Enum):
    """How samples are cut from the documents of a file."""

    across_documents = "across_documents"
    per_document = "per_document"


class DataPosition(Enum):
    """Where a source begins after it replaces another in the middle of a run."""

    run = "run"
    start = "start"


class DigestSource(Enum):
    """The source of the digests of token files at a start."""

    sidecar = "sidecar"
    full = "full"


@dataclass
class DataSection:
    """The source of tokens; keys that its kind does not use must stay null.

    Args:
        kind: `stdlib`, source text of Python's standard library; `text`, text files; `token_file`, token files;
            `megatron`, pairs of `.bin` and `.idx`; `datatrove`, of `.ds` and `.ds.index`; `module`, samples of
            `factory`.
        factory: with `module`: ``package:function``, which returns samples and their fingerprint for each path of
            `train` and `valid`; no checkpoint carries it.
        path: with `text`: a file or glob, ``**`` allowed; plain, gzip, Zstandard or Parquet (column ``text``).
        tokenizer: a tokenizer.json or ``bytes``, saved in every checkpoint. With `text` and `stdlib`, null is that
            beside the weights that `checkpoint` names to start from, else bytes of text only; ``bytes`` takes any file.
            A new model with the vocabulary of bytes, as in tiny presets, takes that of the file.
            With files of tokens, what wrote them; needed for sampled texts.
        train: with files of tokens: a file or glob; with `megatron` also a path without ``.bin``. A list ``[{path: A,
            weight: 0.7}, {path: B, weight: 1/3}]`` blends sources, of `data.kind=text` too, then without `data.path`;
            weights have any sum.
        valid: validation tokens, a path or list of paths, in order; null for none.
        position: where a source that replaces another at a resume begins: `run`, at the run's consumed samples;
            `start`, at its first, once.
        samples: `across_documents` cuts a file's next tokens; `per_document` (`megatron`, `datatrove`) starts at each
            document and pads its last sample, without targets.
        document_mask: keep attention and positions within documents, ended by end-of-text tokens or the index.
        end_of_text: token that ends a document for `document_mask`; null takes the index, else the tokenizer's.
        valid_fraction: fraction held out for validation: of texts whole files, of a single text bytes, else documents.
        cache: folder of prepared token files; null is the user's cache.
        verify: digests of token files: `sidecar` computes them if size or times of change differ from a record beside
            the file; `full`, at every start.
        vocab_size: upper bound of token ids, exclusive; null takes the tokenizer's, with files of tokens none.
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
    verify: DigestSource = DigestSource.sidecar
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class WeightedSection:
    """A section with the path of a source of training data, and the weight of the source."""

    section: DataSection
    weight: Fraction


# Kinds whose files have an index of their documents.
INDEXED_KINDS = frozenset({DataKind.megatron, DataKind.datatrove})
# Kinds whose files are tokens already: their tokenizer is known only where it is named.
TOKEN_KINDS = INDEXED_KINDS | {DataKind.token_file, DataKind.module}
_KEYS_OF_KIND = {kind: {"tokenizer", *(("train", "valid") if kind in TOKEN_KINDS else ())} for kind in DataKind}
_KEYS_OF_KIND[DataKind.text].add("path")
_KEYS_OF_KIND[DataKind.module].add("factory")
_NEEDED_KEY = {DataKind.text: "path", **dict.fromkeys(TOKEN_KINDS, "train")}


def sources_of(section: DataSection) -> list[WeightedSection]:
    """Return a section for each source of the training data; the first has all validation data of token files.

    Args:
        section: a section without `problems`.
    """
    if not isinstance(section.train, list):
        return [WeightedSection(section, Fraction(1))]
    sections = []
    for number, entry in enumerate(section.train):
        path, weight = str(entry["path"]), weight_of(entry["weight"])
        assert weight is not None, "problems finds this"
        if section.kind in TOKEN_KINDS:
            source = replace(section, train=path, valid=None if number else section.valid)
        else:
            source = replace(section, path=path, train=None)
        sections.append(WeightedSection(source, weight))
    return sections


def valid_paths(section: DataSection) -> list[str]:
    """Return the paths of the validation data of token files."""
    return list(section.valid) if isinstance(section.valid, list) else [section.valid] if section.valid else []


def weight_of(value: object) -> Fraction | None:
    """Return a weight exactly as written in decimal digits or as a fraction; None if it is no positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    text = str(value).replace("_", "")  # which separates digits for Fraction
    if len(text) > _MOST_DIGITS or re.search(r"[eE][+-]?\d{4}", text):
        return None  # a fraction of that many digits takes minutes
    try:
        weight = Fraction(str(value))  # the shortest digits of a float, not its binary value
    except (ValueError, ZeroDivisionError):
        return None
    return weight if weight > 0 else None


def problems(section: DataSection) -> list[str]:
    """Return the problems of the section on its own, each as `key=value: reason`; reads no files."""
    messages = []
    allowed, needed = _KEYS_OF_KIND[section.kind], _NEEDED_KEY.get(section.kind)
    is_blend = needed is not None and isinstance(section.train, list)
    if is_blend:
        allowed, needed = allowed - {"path"} | {"train"}, None
    for key in ("factory", "path", "tokenizer", "train", "valid"):
        value = getattr(section, key)
        if key == needed and not value:
            messages.append(f"data.{key}={value or 'null'}: data.kind={section.kind.value} needs a file or a glob")
        elif key not in allowed and value is not None:
            users = ", ".join(kind.value for kind, keys in _KEYS_OF_KIND.items() if key in keys)
            reason = f"data.kind={section.kind.value} does not use it, only {users} does"
            messages.append(f"data.{key}={value}: {'data.train names the sources' if is_blend else reason}")
        elif key == "train" and is_blend:
            messages += _blend_problems(value)
        elif key in ("train", "valid") and value is not None:
            messages += _path_problems(key, value)
    if section.kind is DataKind.module and not re.fullmatch(r"[\w.]+:\w+", section.factory or ""):
        messages.append(f"data.factory={section.factory or 'null'}: data.kind=module needs package:function")
    if section.samples is SampleCut.per_document and section.kind not in INDEXED_KINDS:
        messages.append(
            "data.samples=per_document: needs data.kind=megatron or datatrove, whose index has the documents"
        )
    if section.end_of_text is not None and (section.end_of_text < 0 or not section.document_mask):
        messages.append(f"data.end_of_text={section.end_of_text}: must be a token, and serves data.document_mask only")
    elif section.document_mask and section.kind is DataKind.module:
        messages.append("data.document_mask: not with data.kind=module, whose samples have masks of their own")
    elif section.document_mask and _NEEDED_KEY.get(section.kind) == "train" and not _knows_documents(section):
        messages.append(
            "data.document_mask: needs data.end_of_text, or data.tokenizer, whose end of text ends documents"
        )
    if not 0 < section.valid_fraction < 1:
        messages.append(f"data.valid_fraction={section.valid_fraction}: must be above 0 and below 1")
    if section.vocab_size is not None and section.vocab_size < 1:
        messages.append(f"data.vocab_size={section.vocab_size}: must be at least 1 or null")
    return messages


def _knows_documents(section: DataSection) -> bool:
    return section.kind in INDEXED_KINDS or section.end_of_text is not None or section.tokenizer is not None


def _blend_problems(entries: list[object]) -> list[str]:
    """Return the problems of a list of sources."""
    if not 1 <= len(entries) <= MOST_SOURCES:
        return [f"data.train={'[]' if not entries else 'a list'}: must have 1 to {MOST_SOURCES} sources"]
    messages, seen = [], dict[str, int]()
    for number, entry in enumerate(entries):
        name = f"data.train[{number}]"
        if not isinstance(entry, dict) or entry.keys() != {"path", "weight"}:
            messages.append(f"{name}={entry}: must be {{path: PATH, weight: NUMBER}}")
            continue
        path = entry["path"]
        messages += _path_problems(f"train[{number}].path", [path])
        if weight_of(entry["weight"]) is None:
            messages.append(f"{name}.weight={entry['weight']}: must be a number above 0, or a fraction such as 1/3")
        first = seen.setdefault(str(path), number)
        if first != number:
            messages.append(
                f"{name}.path={path}: is that of data.train[{first}] too; name it once, with the sum of weights"
            )
    return messages


def _path_problems(key: str, value: object) -> list[str]:
    """Return the problems of paths in a list; a path alone is checked with all others of the configuration."""
    if isinstance(value, str):
        return []
    if not isinstance(value, list):
        return [f"data.{key}={value}: must be a path, or a list"]
    if not value:
        return [f"data.{key}=[]: must have a path, or be null"]
    messages = []
    for path in value:
        if not isinstance(path, str) or not path.strip():
            messages.append(f"data.{key}={path}: must be a path")
        elif is_url(path):
            messages.append(f"data.{key}={path}: {url_problem(path)}")
    return messages
