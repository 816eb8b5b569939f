"""The record of a run that is described and not built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import TINY, compose
from trainer.run.build import describe_alone


@pytest.mark.parametrize(("fixed", "expected"), [(0, 3), (2, 2), (7, 7)])
def test_a_record_made_alone_has_the_threads_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    (tmp_path / "text.txt").write_text("some text of a few letters. " * 100)
    data = ["data=text", f"data.path={tmp_path}/text.txt", f"data.cache={tmp_path}/cache"]
    _, description = describe_alone(compose([*TINY, *data, f"train.threads={fixed}"]))
    assert description["environment"]["threads"] == expected
