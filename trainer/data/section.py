"""The section `data` of a configuration, and its validation. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DataKind(Enum):
    """The source of tokens."""

    stdlib = "stdlib"
    text = "text"
    token_file = "token_file"
    megatron = "megatron"


class DigestSource(Enum):
    """The source of the digests of token files at a start."""

    sidecar = "sidecar"
    full = "full"


@dataclass
class DataSection:
    """The section ``data`` of a configuration; a key that its kind does not use must stay null.

    Args:
        kind: source of the tokens: `stdlib`, the source text of Python's standard library; `text`, files of text;
            `token_file`, files of tokens; `megatron`, pairs of `.bin` and `.idx` files as Megatron-LM has them.
        path: with `text`: a file or a glob, ``**`` allowed.
        tokenizer: with `text`: a tokenizer.json; null, or ``bytes``, trains on bytes. With `token_file` and
            `megatron`: the tokenizer that wrote the tokens, a tokenizer.json or ``bytes``, which sampled texts need. It
            is saved with every checkpoint.
        train: with `token_file` and `megatron`: training tokens, a file or a glob; with `megatron` also a prefix, a
            path without ``.bin``.
        valid: the same for validation tokens; null leaves nothing to evaluate on.
        valid_fraction: fraction of the files (of the bytes, for a single file) that is held out for validation.
        cache: folder of prepared token files; null takes the user's cache folder.
        verify: source of the digests of token files: `sidecar` takes them from a small file that an earlier start left
            beside each, if size and times of change are still the same, and else reads the tokens; `full` reads all
            tokens.
        vocab_size: upper bound of the token ids, exclusive; null takes the tokenizer's, and leaves it unknown with
            `token_file` and `megatron`.
    """

    kind: DataKind = DataKind.stdlib
    path: str | None = None
    tokenizer: str | None = None
    train: str | None = None
    valid: str | None = None
    valid_fraction: float = 0.05
    cache: str | None = None
    verify: DigestSource = DigestSource.sidecar
    vocab_size: int | None = None


_KEYS_OF_KIND = {
    DataKind.stdlib: frozenset[str](),
    DataKind.text: frozenset({"path", "tokenizer"}),
    DataKind.token_file: frozenset({"train", "valid", "tokenizer"}),
    DataKind.megatron: frozenset({"train", "valid", "tokenizer"}),
}
_NEEDED_KEY = {DataKind.text: "path", DataKind.token_file: "train", DataKind.megatron: "train"}
# Kinds whose files are tokens already: their tokenizer is known only where it is named.
TOKEN_KINDS = frozenset({DataKind.token_file, DataKind.megatron})


def problems(section: DataSection) -> list[str]:
    """Return the problems of the section on its own, each as `key=value: reason`; reads no files."""
    found = []
    allowed = _KEYS_OF_KIND[section.kind]
    for key in ("path", "tokenizer", "train", "valid"):
        value = getattr(section, key)
        if key == _NEEDED_KEY.get(section.kind) and not value:
            found.append(f"data.{key}={value or 'null'}: data.kind={section.kind.value} needs a file or a glob")
        elif key not in allowed and value is not None:
            users = ", ".join(kind.value for kind, keys in _KEYS_OF_KIND.items() if key in keys)
            found.append(f"data.{key}={value}: data.kind={section.kind.value} does not use it, only {users} does")
    if not 0 < section.valid_fraction < 1:
        found.append(f"data.valid_fraction={section.valid_fraction}: must be above 0 and below 1")
    if section.vocab_size is not None and section.vocab_size < 1:
        found.append(f"data.vocab_size={section.vocab_size}: must be at least 1 or null")
    return found
