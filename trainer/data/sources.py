"""Finds a corpus's files, in an order and with names independent of its location."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import DataError
from reprise.storage import is_dir, is_file
from trainer.data.data_file import changed, unreadable

# Tests show fixtures more than the language; the other folders hold programs and their tests.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
# Written by the build or distribution: the text differs between installations with the same version.
_STDLIB_EXCLUDED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text file as first found; ``name`` is its posix path relative to the data set's root."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Check the file's size and modification time against those first found, which a cache name includes.

        Raises:
            DataError: They differ, or the file is gone.
        """
        now = _source(self.path, self.name)
        if now != self:
            raise changed(self.path, self.size_bytes, now.size_bytes)


def find_files(pattern: str) -> list[Path]:
    """Return the regular files matching a path or a glob (``**`` allowed), sorted, without duplicates.

    Raises:
        DataError: Nothing matches, or a match is neither a file nor a folder.
    """
    expanded = Path(pattern).expanduser()
    # A file name containing glob characters still matches itself.
    if is_file(expanded):
        return [expanded]
    paths = sorted({Path(hit) for hit in glob.glob(str(expanded), recursive=True)})
    files = [path for path in paths if not is_dir(path)]
    if unusable := [path for path in files if not is_file(path)]:
        raise DataError(
            "A glob match is not a file",
            where=unusable[0],
            expected="files (folders are skipped)",
            found="a broken link, a pipe or a device",
        )
    if not files:
        raise DataError(
            "No file matches",
            where=pattern,
            fix=f"Relative paths start at {Path.cwd()}. Quote globs; '**/*.txt' searches subfolders.",
        )
    return files


def text_sources(pattern: str) -> list[TextSource]:
    """Return the files matching ``pattern``, sorted by name relative to the folders before its first wildcard.

    Raises:
        DataError: No file matches, or a file cannot be read.
    """
    paths = find_files(pattern)
    fixed = Path(pattern).expanduser()
    if paths == [fixed]:
        return _sources(fixed.parent, paths)
    # The deepest common folder would change, and every name with it, when a file is added.
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    return _sources(fixed, paths)


def stdlib_sources(root: Path) -> list[TextSource]:
    """Return a standard library's Python files, without tests and installed packages, sorted by relative name.

    Args:
        root: The library folder, ``sysconfig.get_paths()["stdlib"]`` for the running interpreter.

    Raises:
        DataError: There are no files.
    """
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and not name.startswith(_STDLIB_EXCLUDED_PREFIXES) and is_file(path):
                paths.append(path)
    if not paths:
        raise DataError(
            "The standard library of this Python has no source files",
            where=root,
            expected="*.py files",
            found="none",
            fix="Use another interpreter, or set data=text data.path=FILE_OR_GLOB.",
        )
    return _sources(root, paths)


def _sources(root: Path, paths: Iterable[Path]) -> list[TextSource]:
    sources = (_source(path, path.relative_to(root).as_posix()) for path in paths)
    return sorted(sources, key=lambda source: source.name)


def _source(path: Path, name: str) -> TextSource:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return TextSource(path, name, status.st_size, status.st_mtime_ns)
