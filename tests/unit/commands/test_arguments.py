"""Arguments that several commands take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.bench import checkpoint, cuda, local


@pytest.mark.parametrize(
    ("main", "option"),
    [
        (checkpoint.main, "--folder"),
        (cuda.main, "--folder"),
        (local.main, "--local"),
        (local.main, "--shared"),
    ],
    ids=["checkpoint", "cuda", "local", "shared"],
)
def test_a_folder_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], object], option: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option, str(tmp_path / "absent")])
    assert f"argument {option}: there is no folder {tmp_path / 'absent'}" in capsys.readouterr().err
