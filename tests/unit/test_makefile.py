"""The environment that `make` builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_keeps_what_a_user_has_installed_into_the_environment(tmp_path: Path) -> None:
    """The environment is made by the real module venv; pip, which needs a network, is a program that writes down how
    it was called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # `venv` copies pip from the interpreter's own, which takes seconds; here it is there already.
    python = write_program(tmp_path / "python", f'shift 2; exec "{sys.executable}" -m venv --without-pip "$@"')
    write_program(tmp_path / ".venv/bin/pip", f'echo "$@" >> "{tmp_path}/calls"')
    installed = tmp_path / ".venv/lib/installed_by_the_user.py"
    installed.parent.mkdir()
    installed.touch()
    subprocess.run(
        ["make", "setup", f"PYTHON={python}"], cwd=tmp_path, check=True, capture_output=True, timeout=60, text=True
    )
    assert installed.exists()
    assert "--editable .[test,check]" in (tmp_path / "calls").read_text()
    assert (tmp_path / ".venv/pyvenv.cfg").exists()
