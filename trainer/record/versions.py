"""The running software: package versions, and this program's source commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import torch

from reprise import __version__

_ROOT = Path(__file__).resolve().parents[2]
# A work tree on a hanging file system must not hold up a start.
_TIMEOUT_S = 5.0


def versions() -> dict[str, str]:
    """Return the versions of Python and packages affecting a run's bits."""
    return {
        "python": platform.python_version(),
        "reprise": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }


@cache
def source_commit() -> str | None:
    """Return the `commit` for this program's source, as it was at the first call."""
    return commit(_ROOT)


def commit(root: Path) -> str | None:
    """Return the git commit for the source tree at `root`, with `-dirty` after changes to tracked files.

    None if `root` is not a work tree's top folder, as in an installed package, or git does not answer.
    """
    options = "--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no"
    head, *lines = _git(root, "status", *options) or [""]
    name = head.removeprefix("# branch.oid ")
    if name in (head, "(initial)"):  # no work tree, or no commit yet
        return None
    return name if all(line.startswith("#") for line in lines) else f"{name}-dirty"


def _git(root: Path, *arguments: str) -> list[str] | None:
    """Return git's output lines. None if it fails."""
    # Another repository's hook sets these, and git would look there.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables["GIT_OPTIONAL_LOCKS"] = "0"  # looking at the source must not write to it
    variables["GIT_CEILING_DIRECTORIES"] = str(root.parent)  # nor see a repository around it
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, env=variables
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return process.stdout.splitlines() if process.returncode == 0 else None
