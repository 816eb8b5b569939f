"""A run's tokenizer as transformers files beside a model.

Does not need the `tokenizers` package. A tokenizer is copied byte for byte, unless it adds tokens to every text,
truncates, pads or drops out: a run trains without all this, and so does the copy.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reprise.errors import DataError
from trainer.data.byte_level import END_OF_TEXT, bytes_tokenizer
from trainer.data.section import TOKEN_KINDS, DataSection
from trainer.data.text import (
    BYTES,
    END_OF_TEXT_NAMES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    end_of_text_name,
    read_tokenizer,
    tokenizer_path,
)

_log = logging.getLogger(__name__)


def tokenizer_files(section: DataSection, *, rows: int, bos: int, eos: int, positions: int) -> dict[str, bytes]:
    """Return the files by name. Empty if the data is tokenized and `section.tokenizer` does not name its tokenizer.

    A mismatch between the model's and the tokenizer's end of text is logged.

    Args:
        rows: The model's vocabulary size.
        bos: The model's `bos_token_id`. It becomes the tokenizer's if it is a special token there.
        eos: The model's `eos_token_id`, with the same rule.
        positions: The model's context length in tokens.

    Raises:
        DataError: The tokenizer cannot be read, is not a JSON object with a vocabulary, or has more tokens than rows.
    """
    if section.kind in TOKEN_KINDS and section.tokenizer is None:
        return {}
    path = None if section.tokenizer in (None, BYTES) else tokenizer_path(str(section.tokenizer))
    where = path or BYTES
    raw, tokens, special = _as_trained(bytes_tokenizer() if path is None else read_tokenizer(path), where, rows)
    end = END_OF_TEXT if path is None else end_of_text_name(path, tokens, special.values())
    # transformers would turn any other token into a special token, and tokenize texts differently.
    special |= {tokens[name]: name for name in (*END_OF_TEXT_NAMES, end or "") if name in tokens}
    if eos not in special:
        number = "ID" if end is None else tokens[end]
        _log.warning(
            f"model.eos_token_id={eos} is not a special token in the tokenizer {where}, whose end of text is "
            f"{'not known' if end is None else f'{number} ({end})'}; texts will not end there, and config.json names "
            f"tokens that it does not have: set model.bos_token_id={number} model.eos_token_id={number}"
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


def require_rows(tokenizer: Path, rows: int) -> None:
    """Refuse a ``tokenizer.json`` with more tokens than a model has rows.

    Raises:
        DataError: The tokenizer has more tokens, or cannot be read.
    """
    _as_trained(read_tokenizer(tokenizer), tokenizer, rows)


def _as_trained(raw: bytes, where: object, rows: int) -> tuple[bytes, dict[str, int], dict[int, str]]:
    """Return a ``tokenizer.json`` that makes a run's tokens, its ids by token, and its special tokens by id."""
    try:
        table = json.loads(raw)
        changes: dict[str, Any] = {name: None for name in ("truncation", "padding") if table.get(name) is not None}
        if _adds_tokens(table.get("post_processor")):
            changes["post_processor"] = None
        if table["model"].get("dropout"):
            changes["model"] = {**table["model"], "dropout": None}
        entries = table.get("added_tokens") or []
        added = {str(entry["content"]): entry["id"] for entry in entries}
        special = {added[entry["content"]]: entry["content"] for entry in entries if entry["special"]}
        vocabulary = table["model"]["vocab"]
        if not isinstance(vocabulary, Mapping):  # a list of (token, score), indexed by id
            vocabulary = {name: number for number, (name, _) in enumerate(vocabulary)}
        tokens = {**vocabulary, **added}
        largest = max(map(operator.index, tokens.values()), default=0)
        raw = _to_bytes({**table, **changes}) if changes else raw
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "A tokenizer cannot be saved beside the model",
            where=where,
            expected="a tokenizer.json: a JSON object with a model and its vocab",
            found=repr(error),
            fix="Correct data.tokenizer.",
        ) from error
    if largest >= rows:
        raise DataError(
            "A tokenizer has more tokens than the model's vocabulary",
            where=where,
            expected=f"model.vocab_size of at least {largest + 1}",
            found=rows,
            fix="Use the tokenizer that matches the model, or raise model.vocab_size.",
        )
    return raw, tokens, special


def _adds_tokens(processor: Any) -> bool:
    if processor is None or processor["type"] == "ByteLevel":
        return False
    return processor["type"] != "Sequence" or any(_adds_tokens(part) for part in processor["processors"])


def _to_bytes(table: Mapping[str, object]) -> bytes:
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
