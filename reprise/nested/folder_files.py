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
        contents[name] = _content(name, content)
        if len(contents[name]) > json_file.MAX_BYTES:
            raise CheckpointError(
                "A file for a checkpoint is too large",
                where=f"`files`, {name}",
                expected=f"<= {json_file.MAX_BYTES} B",
                found=f"{len(contents[name])} B",
            )
    return contents


def _content(name: str, content: object) -> bytes:
    try:
        if isinstance(content, Path):
            return content.read_bytes()
        if isinstance(content, (dict, list)):
            content = json.dumps(content, indent=2, allow_nan=False) + "\n"
        return content.encode() if isinstance(content, str) else bytes(memoryview(content))  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            "The content of a file cannot be read, or written as UTF-8 or JSON",
            where=f"`files`, {name}",
            expected="bytes, text, a pathlib.Path, or a dict or list for JSON",
            found=error,
        ) from error
