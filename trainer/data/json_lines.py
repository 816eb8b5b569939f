"""Distinguishes document files, JSON lines and Parquet, from files with a single text.

JSON lines are recognized by file name or else by content: the first line is an object with a text under the key, or the
first two lines are objects. An array of such objects is refused. Any other JSON, such as a `package.json` among
sources, is a text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from reprise.errors import DataError
from trainer.data.text_file import PARQUET, open_text, plain_name

# Piece sizes read from a file, in order, until its form shows.
_BYTES = (8 << 10, 64 << 20)
_SUFFIXES = (".jsonl", ".ndjson")
_AFTER_OBJECT = re.compile(r"[ \t\r]*(?:\n\s*|\Z)")


def is_json_lines(path: Path, key: str = "text", *, takes_bytes: bool = False) -> bool:
    """Return whether a file has a document per line or row, judged by its form, its name or its first objects.

    Args:
        key: Key for the text in an object or a row.
        takes_bytes: Accept files with any bytes, and an array of documents as a single text.

    Raises:
        DataError: The file cannot be read, is not text, or is an array of documents.
    """
    with open_text(path, key=key, takes_bytes=takes_bytes) as reader:
        if reader.form == PARQUET or plain_name(path.name).endswith(_SUFFIXES):
            return True
        head, text, has_documents = b"", "", None
        for size in _BYTES:
            if has_documents is None and reader.has_more():
                head += reader.read(size)
                text = head.decode("utf-8-sig", "replace").lstrip()
                has_documents = _begins_with_documents(text, key)
    if has_documents and text.startswith("[") and not takes_bytes:
        raise DataError(
            "The file is one JSON array, not JSON lines",
            where=path,
            expected="JSON lines, each an object",
            found=f"a JSON array of objects with {key!r}",
            fix=f"Convert it to lines: jq -c '.[]' {path} > LINES.jsonl. `reprise prepare-data --form text` reads the "
            "array as one text.",
        )
    return bool(has_documents) and not text.startswith("[")


def _begins_with_documents(text: str, key: str) -> bool | None:
    """Return whether a text starts with documents, as JSON lines or in an array.

    In JSON lines, the first line is an object with a text, or an object followed by another. In an array, the first
    object has a text.

    Returns:
        None if the text does not show it, as it may be the beginning of a longer text.
    """
    start, decode = re.match(r"(?:\[\s*)?(?=\{)", text), json.JSONDecoder().raw_decode
    if start is None:
        return False
    try:
        first, end = decode(text, start.end())
        has_text, line_end = isinstance(first.get(key), str), _AFTER_OBJECT.match(text, end)
        if start[0] or line_end is None or "\n" in text[:end]:
            return has_text and bool(start[0])
        return has_text or isinstance(decode(text, line_end.end())[0], dict)
    except (ValueError, RecursionError):
        return None if start[0] or text.count("\n") < 2 else False  # an object over several lines
