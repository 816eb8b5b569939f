"""What is decided before a run is built: the record of one that is only described, and what its retention keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import TINY, compose
from trainer.config.schema import CheckpointSection, LocalSection
from trainer.run.build import describe_alone, named_iteration


@pytest.mark.parametrize(("fixed", "expected"), [(0, 3), (2, 2), (7, 7)])
def test_a_record_made_alone_has_the_threads_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    (tmp_path / "text.txt").write_text("some text of a few letters. " * 100)
    data = ["data=text", f"data.path={tmp_path}/text.txt", f"data.cache={tmp_path}/cache"]
    _, description = describe_alone(compose([*TINY, *data, f"train.threads={fixed}"]))
    assert description["environment"]["threads"] == expected


@pytest.mark.parametrize(
    ("load", "ckpt_step", "expected"),
    [
        ("auto", None, None),
        ("auto", 4, 4),
        ("none", None, None),
        ("RUN", 4, 4),
        ("RUN/checkpoints", 4, 4),
        ("RUN/checkpoints", None, None),
        ("RUN/checkpoints/../checkpoints/iter_0000006", None, 6),
        ("RUN/checkpoints/iter_0000006.superseded-1", None, None),
        ("OTHER/checkpoints", 4, None),
        ("OTHER/checkpoints/iter_0000006", None, None),
    ],
)
def test_a_command_names_an_iteration_of_its_own_folder(
    tmp_path: Path, load: str, ckpt_step: int | None, expected: int | None
) -> None:
    for name in ("run", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    load = load.replace("RUN", str(tmp_path / "run")).replace("OTHER", str(tmp_path / "other"))
    section = CheckpointSection(save=str(tmp_path / "run/checkpoints"), load=load, ckpt_step=ckpt_step)
    assert named_iteration(section) == expected


def test_local_folders_alone_have_named_iterations_too() -> None:
    local = LocalSection(dir="/dev/shm/run")
    assert named_iteration(CheckpointSection(save=None, local=local, ckpt_step=4)) == 4
    assert named_iteration(CheckpointSection(save=None, ckpt_step=4)) is None


def test_a_start_at_iteration_0_goes_on_from_no_iteration(tmp_path: Path) -> None:
    load = str(tmp_path / "checkpoints")
    assert named_iteration(CheckpointSection(save=load, load=load, ckpt_step=4, finetune=True)) is None
