"""The hooks of .pre-commit-config.yaml that are programs of their own."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import ROOT


@pytest.mark.parametrize(("length", "status"), [(72, 0), (73, 1)])
def test_a_commit_subject_has_at_most_72_characters(tmp_path: Path, length: int, status: int) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook["id"] == "subject"]
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("x" * length + "\n\n" + "A body may have longer lines. " * 4)
    assert subprocess.run([*shlex.split(hook["entry"]), message], check=False).returncode == status
