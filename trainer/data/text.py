"""Converts texts to tokens and back, as bytes or with a tokenizer."""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reprise.errors import DataError
from reprise.storage import exists, is_url, read_regular
from reprise.stores import files_of, is_stored, location
from trainer.data.byte_level import END_OF_TEXT, END_OF_TEXT_ID, bytes_tokenizer
from trainer.data.cuts import CHARACTERS, NOWHERE, WORDS, Cuts
from trainer.data.data_file import TokenArray, unreadable

_log = logging.getLogger(__name__)

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")
# Every checkpoint saves the file; the largest in use are below 40 MiB.
MOST_TOKENIZER_BYTES = 64 << 20
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Converts texts to tokens and back. Encoders with the same ``label`` give the same tokens.

    ``decode`` takes any numbers: an invalid token, or part of a character, appears as such or not at all. A text cut at
    ``cuts`` has the same tokens as the uncut text.
    """

    label: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str], TokenArray]
    decode: Callable[[Sequence[int]], str]
    cuts: Cuts

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Return the smallest token file dtype for the tokens."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


def bytes_encoder() -> Encoder:
    """Return the encoder with bytes 0 to 255 as tokens and 256 as end of text."""

    def decode(tokens: Sequence[int]) -> str:
        pieces = (bytes([t]) if t < 256 else END_OF_TEXT.encode() if t == END_OF_TEXT_ID else b"" for t in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    return Encoder(
        label=BYTES,
        vocab_size=END_OF_TEXT_ID + 1,
        end_of_text=END_OF_TEXT_ID,
        encode=lambda text: np.frombuffer(text.encode(), np.uint8),
        decode=decode,
        cuts=CHARACTERS,
    )


def open_encoder(name: str | Path | None) -> Encoder:
    """Return the encoder for a ``tokenizer.json``, using the package `tokenizers`, or for bytes if "bytes" or None.

    The file's truncation, padding and dropout are switched off, with a log line.

    Raises:
        DataError: The package is missing, the file is not a tokenizer, or it has no end-of-text token.
    """
    path = tokenizer_path(name)
    if path is None:
        return bytes_encoder()
    file = open_tokenizer(path)
    if file.read == bytes_tokenizer():
        return bytes_encoder()
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "data.tokenizer needs the tokenizers package", where=path, fix="Install it: pip install tokenizers."
        ) from error
    try:
        # Texts are encoded without its additions, so only other changes need a new file, which takes long to write.
        tokenizer = tokenizers.Tokenizer.from_buffer(file.raw if file.switched_off else file.read)
    except ValueError as error:
        raise _malformed(path, error) from error
    if file.switched_off:
        _report_once(f"{path}: texts are encoded without its {file.switched_off}")
    # A text that only mentions "<|endoftext|>" is ordinary text.
    tokenizer.encode_special_tokens = True
    if file.end is None:
        raise DataError(
            "A tokenizer has no end-of-text token",
            where=path,
            expected=f"one of {', '.join(END_OF_TEXT_NAMES)}, or the eos_token of a {TOKENIZER_CONFIG}",
            found=f"none among {len(file.ids)} tokens",
            fix="Add one of them to the tokenizer.",
        )
    end_of_text = file.ids[file.end]

    def encode(text: str) -> TokenArray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    digest = xxhash.xxh3_64_hexdigest(file.read)
    label = f"tokenizers {tokenizers.__version__} {digest} {end_of_text} {file.switched_off}"
    pieces = tokenizer.pre_tokenizer
    # Without pieces, or with pieces of a fixed length, a token may depend on all of the text before it.
    is_local = pieces is not None and b"FixedLength" not in pieces.__getstate__()
    cuts = replace(WORDS, encode=encode) if is_local else NOWHERE
    return Encoder(label, file.rows, end_of_text, encode, decode, cuts)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A ``tokenizer.json`` as a run uses it: it does not add tokens to texts, truncate, pad or drop out.

    Args:
        read: The file's bytes.
        changed: Its content without such settings. None if it has none.
        switched_off: Its settings that would drop, add or randomize tokens.
        ids: Token ids by token.
        special: The special tokens by id.
        end: The end of text, see `_end_of_text`. None if there is none.
    """

    read: bytes
    changed: Mapping[str, object] | None
    switched_off: str
    ids: dict[str, int]
    special: dict[int, str]
    end: str | None

    @property
    def raw(self) -> bytes:
        """Return the file for a run, byte for byte unless it changes."""
        return self.read if self.changed is None else json_bytes(self.changed)

    @property
    def rows(self) -> int:
        """Return the rows that a model needs. Ids may have holes, so the largest counts, not their number."""
        return max(self.ids.values(), default=0) + 1


def open_tokenizer(path: Path | None) -> TokenizerFile:
    """Return a tokenizer, by default for bytes, without the `tokenizers` package.

    Raises:
        DataError: A file cannot be read, is not a tokenizer, or its configuration names a token that it lacks.
    """
    raw = bytes_tokenizer() if path is None else read_tokenizer(path)
    try:
        table = json.loads(raw)
        changes: dict[str, Any] = {name: None for name in ("truncation", "padding") if table.get(name) is not None}
        if table["model"].get("dropout"):
            changes["model"] = {**table["model"], "dropout": None}
        switched_off = ", ".join(changes).replace("model", "dropout")
        if (processor := table.get("post_processor")) is not None and processor["type"] != "ByteLevel":
            changes["post_processor"] = None  # it may add tokens
        entries, vocabulary = table.get("added_tokens") or [], table["model"]["vocab"]
        if not isinstance(vocabulary, Mapping):  # a list of (token, score), indexed by id
            vocabulary = {name: number for number, (name, _) in enumerate(vocabulary)}
        ids = {name: operator.index(number) for name, number in vocabulary.items()}
        ids |= {str(entry["content"]): operator.index(entry["id"]) for entry in entries}
        special = {entry["id"]: entry["content"] for entry in entries if entry["special"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _malformed(path, error) from error
    end = END_OF_TEXT if path is None else _end_of_text(path, ids, special.values())
    return TokenizerFile(raw, {**table, **changes} if changes else None, switched_off, ids, special, end)


def _malformed(path: object, error: Exception) -> DataError:
    return DataError(
        "A tokenizer cannot be read",
        where=path,
        expected="a tokenizer.json written by the tokenizers package: a JSON object with a model and its vocab",
        found=f"{error!r:.300}",
        fix="Correct data.tokenizer.",
    )


def json_bytes(table: Mapping[str, object]) -> bytes:
    """Return a file of transformers."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


_report_once = cache(_log.warning)


def _end_of_text(path: Path, names: Collection[str], special: Collection[str]) -> str | None:
    """Return the end-of-text token, or None.

    It is the ``eos_token`` in the ``tokenizer_config.json`` beside a ``tokenizer.json``, else the first of
    `END_OF_TEXT_NAMES` among the special tokens, else the first among all.

    Args:
        path: The tokenizer file. A `NAME.json` has its configuration in `NAME_config.json`.
        names: All its tokens.
        special: Its special tokens.

    Raises:
        DataError: The configuration cannot be read, or names a token missing from the tokenizer.
    """
    config = path.with_name(f"{path.stem}_config.json")
    try:
        token = json.loads(read_tokenizer(config)).get("eos_token") if exists(config) else None
        name = token["content"] if isinstance(token, dict) else token
        if name is None:
            return next((name for tokens in (special, names) for name in END_OF_TEXT_NAMES if name in tokens), None)
        if name in names:
            return str(name)
        problem = f"{name!r}, which {path} lacks"
    except OSError as error:
        raise unreadable(config, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = repr(error)
    raise DataError(
        "A tokenizer's configuration cannot be read",
        where=config,
        expected="a JSON object, with one of the tokens as its eos_token if any",
        found=problem,
        fix="Correct the file, or remove it.",
    )


def tokenizer_path(name: str | Path | None) -> Path | None:
    """Return a tokenizer's path, of a file or of an object beside a checkpoint in a store. None for bytes, or None."""
    if name is None or str(name) == BYTES:
        return None
    if isinstance(name, Path):
        return name
    return location(name) if is_url(name) else Path(name).expanduser()


def read_tokenizer(path: Path) -> bytes:
    """Return a ``tokenizer.json`` file's bytes.

    Raises:
        DataError: It cannot be read, is not a regular file, or is larger than `MOST_TOKENIZER_BYTES`.
    """
    try:
        if is_stored(path):  # beside a checkpoint in a store
            return files_of(path).read_whole(path)
        return read_regular(path, limit_bytes=MOST_TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def prompt_tokens(encoder: Encoder, prompt: str, vocab_size: int) -> list[int]:
    """Return a prompt's tokens. For an empty prompt, return the end-of-text token.

    Raises:
        DataError: The prompt is not Unicode, or a token is not below ``vocab_size``.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError("The prompt is not Unicode text", found=str(error)) from error
    tokens: list[int] = encoder.encode(prompt).tolist() or [encoder.end_of_text]
    if max(tokens) >= vocab_size:
        raise DataError(
            "A token of the prompt is outside the model's vocabulary",
            expected=f"0 to {vocab_size - 1}",
            found=max(tokens),
            fix="Use the tokenizer that wrote the training data.",
        )
    return tokens
