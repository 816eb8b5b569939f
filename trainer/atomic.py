"""A file or a folder that is there whole and durable, or not at all. What is in it is told elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.storage.files import Files, cannot_write, describe_free_space
from trainer.errors import CheckpointError


@contextmanager
def atomic_output(out: Path, files: Files) -> Iterator[Path]:
    """Give a path beside `out` to write to, whose files the caller syncs; it becomes `out` at the end, by one rename.

    Raises:
        CheckpointError: if something is at `out` already, its folder is not there, or the file system fails; nothing
            is left then.
    """
    _refuse(out)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if partial.is_dir():
            for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
                files.sync_folder(folder)
        _refuse(out)
        files.rename(partial, out)
        files.sync_folder(out.parent)
    except OSError as error:
        raise output_failed(out, error, files) from error
    finally:
        if partial.is_dir():
            files.remove_tree(partial)
        else:
            files.remove_file(partial)


def _refuse(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError("There is something already", where=out, fix="Move it away, or name another path.")
    if not out.parent.is_dir():
        raise CheckpointError("There is no folder to write to", where=out.parent, fix="Make it, or name another path.")


def output_failed(path: Path, error: OSError, files: Files) -> CheckpointError:
    """Return the error of an output that cannot be written."""
    found = describe_free_space(files, path.parent)
    fix = "Nothing was committed; make room or fix the disk."
    return cannot_write(path, error, what="The output", found=found, fix=fix)
