"""The commit of the source is that of its own work tree, and of no other repository around it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import reprise
from tests import ROOT
from trainer.record.versions import commit, source_commit, versions


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_versions_are_those_that_run() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["reprise"] == reprise.__version__
    assert found.keys() == {"python", "reprise", "torch", "numpy"}


def test_the_commit_is_that_of_the_checkout() -> None:
    assert source_commit() == commit(ROOT) is not None


def test_a_commit_and_changes_after_it(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    (tmp_path / "inner").mkdir()
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head
    assert commit(tmp_path / "inner") is None
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
