"""Token files for the configuration's data section: existing files, or text tokenized into a cache."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from reprise.errors import DataError
from trainer.data.indexed_file import find_indexed
from trainer.data.section import TOKEN_KINDS, DataKind, DataSection, valid_paths
from trainer.data.sources import TextSource, find_files, stdlib_sources, text_sources
from trainer.data.text import Encoder, open_encoder
from trainer.data.token_file import open_token_file, write_token_file

if TYPE_CHECKING:
    from trainer.data.blocks import SplitOptions

# Part of every cache name: increase it when the same texts give different token files.
_CACHE_VERSION = 4
# How to find files by pattern; all other kinds use globs.
_FINDERS: Mapping[DataKind, Callable[[str], list[Path]]] = {
    DataKind.megatron: find_indexed,
    DataKind.module: lambda path: [Path(path)],
}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token files in reading order, and the token after each document (None if unknown)."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    end_of_text: int | None = None


def default_cache(environment: Mapping[str, str], home: Path) -> Path:
    """Return ``$XDG_CACHE_HOME/reprise``, or ``~/.cache/reprise`` if the variable is unset or relative.

    Source: XDG Base Directory Specification 0.8.
    """
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else home / ".cache") / "reprise"


def prepare(section: DataSection, *, cache: Path) -> Corpus:
    """Return the token files for a section with a single source, writing missing files to the cache.

    The files are a pure function of the texts, their relative names, the encoder and ``valid_fraction``. The cache key
    covers names, sizes and modification times, so a hit does not read the texts. Any number of processes may call this
    at the same time: each does the work, and a single result remains.

    Args:
        section: A section without `trainer.data.section.problems`.
        cache: The cache folder, created if needed.

    Raises:
        DataError: Files are missing, unreadable or malformed.
    """
    if section.kind in TOKEN_KINDS:
        find = _FINDERS.get(section.kind, find_files)
        return Corpus(
            train=tuple(find(section.train)) if section.train else (),
            valid=tuple(path for pattern in valid_paths(section) for path in find(pattern)),
        )
    encoder = open_encoder(section.tokenizer)
    if section.kind is DataKind.text:
        sources = text_sources(section.path or "")
    else:
        sources = stdlib_sources(Path(sysconfig.get_paths()["stdlib"]))
    folder = cache / f"{section.kind.value}-{_key(sources, encoder, section.valid_fraction)}"
    train, valid = folder / "train.bin", folder / "valid.bin"
    if not (_is_complete(train) and _is_complete(valid)):
        from trainer.data.blocks import SplitOptions

        _write(folder, sources, SplitOptions(valid_fraction=section.valid_fraction), encoder)
    return Corpus((train,), (valid,), encoder.end_of_text)


def _key(sources: Sequence[TextSource], encoder: Encoder, valid_fraction: float) -> str:
    files = [[source.name, source.size_bytes, source.mtime_ns] for source in sources]
    # The folder counts too: two data sets may have the same file names, sizes and times.
    root = os.path.abspath(sources[0].path)
    parts = [_CACHE_VERSION, platform.python_version(), encoder.label, valid_fraction, root, files]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, separators=(",", ":")).encode("ascii"))


def _is_complete(path: Path) -> bool:
    # A rename creates the file last, so its name and header size are enough. A file damaged later is rewritten.
    try:
        open_token_file(path)
    except DataError:
        return False
    return True


def _write(folder: Path, sources: Sequence[TextSource], options: SplitOptions, encoder: Encoder) -> None:
    from trainer.data.blocks import read_blocks, split
    from trainer.data.encoding import encode_block

    for name, parts in split(sources, options).items():
        tokens = (encode_block(block, encoder).tokens for block in read_blocks(parts, encoder.cuts))
        write_token_file(folder / f"{name}.bin", tokens, dtype=encoder.dtype)
