"""The caller's files for other programs, stored in a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.format.layout import TensorKind
from reprise.format.names import HOST, INDEX, MANIFEST, STATE
from reprise.storage import json_file
from reprise.storage.holds import HOLD
from reprise.storage.paths import is_file_name

_RESERVED = {MANIFEST, STATE, INDEX, HOST, HOLD, *(kind.value for kind in TensorKind)}


def folder_files(files: Mapping[str, object] | None) -> dict[str, bytes]:
    """Return each file's content by its name.

    Args:
        files: By name: bytes, text, a path to read now, or a dict or list to write as JSON.

    Raises:
        CheckpointError: A name belongs to the checkpoint's own files, or the content has another type or is too large.
    """
    contents: dict[str, bytes] = {}
    for name, content in (files or {}).items():
        is_name = isinstance(name, str) and is_file_name(name) and name not in _RESERVED
        if not is_name or name.startswith(".") or name.endswith(".safetensors"):
            raise CheckpointError(
                "A file cannot have this name in a checkpoint",
                where="`files`",
                expected="a name without a folder, other than those of the checkpoint's own files",
                found=repr(name),
            )
        try:
            contents[name] = _content(content)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(
                "The content of a file cannot be read, or written as UTF-8 or JSON",
                where=f"`files`, {name}",
                expected=f"bytes, text, a pathlib.Path, or a dict or list for JSON, at most {json_file.MAX_BYTES} B",
                found=error,
            ) from error
    return contents


def _content(content: object) -> bytes:
    if isinstance(content, (dict, list)):
        content = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if isinstance(content, str):
        content = content.encode()
    data = content.read_bytes() if isinstance(content, Path) else bytes(memoryview(content))  # type: ignore[arg-type]
    if len(data) > json_file.MAX_BYTES:
        raise ValueError(f"{len(data)} B")
    return data
