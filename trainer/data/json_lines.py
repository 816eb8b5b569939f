"""Distinguishes document files, JSON lines and Parquet, from files with a single text.

JSON lines are recognized by file name, or by a first line that is an object with a text under the key. Any other JSON,
such as a `package.json` among sources, is a text.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainer.data.text_file import PARQUET, open_text, plain_name

_PIECE_BYTES, _MOST_BYTES = 8 << 10, 64 << 20  # of a first line
_SUFFIXES = (".jsonl", ".ndjson")


def is_json_lines(path: Path, key: str = "text", *, takes_bytes: bool = False) -> bool:
    """Return whether a file has a document per line or row, judged by its form, its name or its first line.

    Args:
        key: Key for the text in an object or a row.
        takes_bytes: Accept files with any bytes.

    Raises:
        DataError: The file cannot be read, or is not text.
    """
    with open_text(path, key=key, takes_bytes=takes_bytes) as reader:
        if reader.form == PARQUET or plain_name(path.name).endswith(_SUFFIXES):
            return True
        head = reader.read(_PIECE_BYTES)
        while head.lstrip().startswith(b"{") and b"\n" not in head and reader.has_more() and len(head) < _MOST_BYTES:
            head += reader.read(len(head))
    try:
        first = json.loads(head.partition(b"\n")[0])
        return isinstance(first, dict) and isinstance(first.get(key), str)
    except (ValueError, RecursionError):
        return False
