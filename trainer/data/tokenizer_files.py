"""The tokenizer of a run as files for transformers beside a model.

Needs no `tokenizers` package. A tokenizer is copied byte for byte, unless it adds tokens to every text by itself: a run
trains without those, so the copy does not add them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reprise.errors import DataError
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.section import TOKEN_KINDS, DataSection
from trainer.data.text import BYTES, END_OF_TEXT_NAMES, read_tokenizer

_log = logging.getLogger(__name__)

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer_files(section: DataSection, *, bos: int, eos: int, positions: int) -> dict[str, bytes]:
    """Return the files by name; none for token files if `section.tokenizer` does not name their tokenizer.

    A mismatch of the model's and the tokenizer's end of text is logged.

    Args:
        bos: the model's `bos_token_id`; it becomes the tokenizer's if it is a special token there.
        eos: the same for the end of text.
        positions: the model's context length in tokens.

    Raises:
        DataError: the tokenizer cannot be read, or is not a JSON object with a vocabulary.
    """
    if section.kind in TOKEN_KINDS and section.tokenizer is None:
        return {}
    if section.tokenizer in (None, BYTES):
        raw, where = bytes_tokenizer(), BYTES
    else:
        raw, where = read_tokenizer(Path(str(section.tokenizer)).expanduser()), str(section.tokenizer)
    raw, special = _as_trained(raw, where)
    if eos not in special:
        ends = ", ".join(f"{number} ({name})" for number, name in special.items() if name in END_OF_TEXT_NAMES)
        _log.warning(
            f"model.eos_token_id={eos} is no special token of the tokenizer {where}, whose end of text is "
            f"{ends or 'not known'}; texts will not end there"
        )
    table: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "bos_token": special.get(bos),
        "eos_token": special.get(eos),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    config = {name: value for name, value in table.items() if value is not None}
    return {TOKENIZER: raw, TOKENIZER_CONFIG: _to_bytes(config)}


def _as_trained(raw: bytes, where: str) -> tuple[bytes, dict[int, str]]:
    """Return a ``tokenizer.json`` without tokens added by itself, and its special tokens by id."""
    try:
        table = json.loads(raw)
        if _adds_tokens(table.get("post_processor")):
            raw = _to_bytes({**table, "post_processor": None})
        return raw, _special_tokens(table)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "a tokenizer cannot be saved beside the model",
            where=where,
            expected="a tokenizer.json: a JSON object with a model and its vocab",
            found=repr(error),
            fix="Correct data.tokenizer.",
        ) from error


def _adds_tokens(processor: Any) -> bool:
    if processor is None or processor["type"] == "ByteLevel":
        return False
    return processor["type"] != "Sequence" or any(_adds_tokens(part) for part in processor["processors"])


def _special_tokens(table: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer, and its tokens at the end of a text, by id.

    Only these may be declared to transformers as the end of text: any other token would become a special one, and texts
    would be tokenized differently.
    """
    added = [entry for entry in table.get("added_tokens") or [] if entry["special"]]
    special = {_id(entry["id"]): str(entry["content"]) for entry in added}
    vocabulary = table["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        special |= {_id(vocabulary[name]): name for name in END_OF_TEXT_NAMES if name in vocabulary}
    return special


def _id(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no number of a token")
    return value


def _to_bytes(table: Mapping[str, object]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
