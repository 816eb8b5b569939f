"""The tokenizer beside weights, which a run's texts use unless the run names another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reprise.errors import DataError
from reprise.storage import is_file
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.section import TOKEN_KINDS, DataSection
from trainer.data.text import BYTES, TOKENIZER, TOKENIZER_CONFIG, read_tokenizer

# The files transformers tokenizers are saved as.
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json")


def tokenizer_files_in(folder: Path) -> dict[str, Path]:
    """Return a folder's tokenizer files, by name."""
    return {name: folder / name for name in TOKENIZER_FILES if is_file(folder / name)}


def with_tokenizer(section: DataSection, files: Mapping[str, Path]) -> str | None:
    """Return `data.tokenizer` for training on texts: the weights' tokenizer, unless the section names another.

    Args:
        files: The tokenizer files beside the weights, by name.

    Returns:
        None for the byte tokenizer, and for tokenized files, whose tokenizer is unknown.

    Raises:
        DataError: The weights have a tokenizer in another form, or it cannot be read.
    """
    if section.kind in TOKEN_KINDS or section.tokenizer is not None:
        return section.tokenizer
    if TOKENIZER in files:
        path = files[TOKENIZER]
        return None if read_tokenizer(path) == bytes_tokenizer() else str(path.absolute())
    for name in _OTHER_VOCABULARIES:
        if name in files:
            raise DataError(
                "The texts and the weights have different tokenizers",
                where="data.tokenizer",
                expected=f"that of {files[name]}, as a {TOKENIZER}",
                found=f"{BYTES}, because none is set",
                fix=f"Make a {TOKENIZER} with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or write "
                "another tokenizer out: data.tokenizer=PATH, or data.tokenizer=bytes.",
            )
    return None
