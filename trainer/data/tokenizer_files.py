"""A run's tokenizer as transformers files beside a model.

Does not need the `tokenizers` package. A tokenizer is copied byte for byte, unless it adds tokens to every text,
truncates, pads or drops out: a run trains without all this, and so does the copy.
"""

from __future__ import annotations

import logging

from reprise.errors import DataError
from trainer.data.section import TOKEN_KINDS, DataSection
from trainer.data.text import (
    BYTES,
    END_OF_TEXT_NAMES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TokenizerFile,
    json_bytes,
    open_tokenizer,
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
    path = tokenizer_path(section.tokenizer)
    file, where = open_tokenizer(path), path or BYTES
    require_rows(file, where, rows)
    # transformers would turn any other token into a special token, and tokenize texts differently.
    ends = {file.ids[name]: name for name in (*END_OF_TEXT_NAMES, file.end) if name in file.ids}
    special = file.special | ends
    if eos not in special:
        _log.warning(
            f"model.eos_token_id={eos} is not a special token in the tokenizer {where}, "
            f"whose end of text is {file.end}; texts will not end there: set model.bos_token_id and "
            "model.eos_token_id to it"
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
    return {TOKENIZER: file.raw, TOKENIZER_CONFIG: json_bytes(config)}


def require_rows(file: TokenizerFile, where: object, rows: int) -> None:
    """Refuse a tokenizer with more tokens than a model has rows.

    Args:
        where: The tokenizer's path, to name in the error.
    """
    if file.rows > rows:
        raise DataError(
            "A tokenizer has more tokens than the model's vocabulary",
            where=where,
            expected=f"model.vocab_size of at least {file.rows}",
            found=rows,
            fix="Use the tokenizer that matches the model, or raise model.vocab_size.",
        )
