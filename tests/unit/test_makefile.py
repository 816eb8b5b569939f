"""The environment that `make` builds, and the Python that it takes for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.harness import DEADLINE_S

OLD = "exit 1"  # as a Python before 3.11 answers, or pyenv's name for a version that is switched off

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def write_python(path: Path) -> Path:
    """Write an interpreter that is this one, but makes environments without pip, whose copy takes seconds."""
    return write_program(
        path,
        f'[ "$1 $2" = "-m venv" ] || exec "{sys.executable}" "$@"\n'
        f'shift 2; exec "{sys.executable}" -m venv --without-pip "$@"',
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that `make setup` can be run in: pip, which needs a network, writes down how it was called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    write_program(tmp_path / ".venv/bin/pip", f'echo "$@" >> "{tmp_path}/calls"')
    return tmp_path


def make(project: Path, *arguments: str, programs: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `make setup`, with `programs` first on PATH and none of this machine's interpreters behind it."""
    # These tests run below `make test`, whose level and flags would change what this `make` prints.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    if programs is not None:
        for name in ("bash", "env", "sh", "touch", "echo"):
            (programs / name).symlink_to(shutil.which(name) or name)
        environment["PATH"] = str(programs)
    return subprocess.run(
        [shutil.which("make") or "make", "setup", *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        timeout=DEADLINE_S,
        text=True,
    )


def test_make_keeps_packages_a_user_has_installed(project: Path) -> None:
    installed = project / ".venv/lib/installed_by_the_user.py"
    installed.parent.mkdir()
    installed.touch()
    done = make(project, f"PYTHON={write_python(project / 'python')}")
    assert done.returncode == 0, done.stderr
    assert installed.exists()
    assert "--editable .[test,check,docs]" in (project / "calls").read_text()
    assert (project / ".venv/pyvenv.cfg").exists()


@pytest.mark.parametrize("only", ["python3", pytest.param("python3.12", marks=pytest.mark.slow), "python3.11"])
def test_make_takes_the_python_that_is_there_and_names_it(project: Path, tmp_path: Path, only: str) -> None:
    programs = tmp_path / "programs"
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        write_program(programs / name, OLD)
    write_python(programs / only)
    done = make(project, programs=programs)
    assert done.returncode == 0, done.stderr
    version = ".".join(map(str, sys.version_info[:3]))
    assert done.stdout.splitlines()[0] == f"Python {version} at {programs / only} makes .venv"


@pytest.mark.parametrize("arguments", [(), ("PYTHON=python2.7",)], ids=["none found", "a wrong one named"])
def test_make_says_in_one_line_that_there_is_no_python(
    project: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    programs = tmp_path / "programs"
    write_program(programs / "python3", OLD)
    write_program(programs / "python2.7", OLD)
    done = make(project, *arguments, programs=programs)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "found no Python 3.11 or newer" in line
    assert ("python2.7" in line) == bool(arguments)
    assert not (project / ".venv/pyvenv.cfg").exists()


@pytest.mark.parametrize("is_gone", [False, True], ids=["too old", "gone"])
def test_make_leaves_an_environment_whose_python_does_not_run(project: Path, is_gone: bool) -> None:
    if is_gone:
        (project / ".venv/bin/python").symlink_to(project / "uninstalled")
    else:
        write_program(project / ".venv/bin/python", OLD)
    done = make(project, f"PYTHON={write_python(project / 'python')}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "`make clean` removes .venv" in line
    assert (project / ".venv/bin/pip").exists()
    assert not (project / "calls").exists()
