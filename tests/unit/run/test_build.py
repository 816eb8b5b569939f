"""The record of a run that is described and not built, and what a built run compiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.layers import token_loss
from reprise.ranks import single_rank_channel
from tests.harness import TINY, built, compose
from tests.unit.start.test_decide import cluster_of, config_in
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


@pytest.mark.parametrize("compiles", [False, True])
def test_the_loss_is_compiled_with_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    compiled = list[Callable[..., Any]]()

    def compile_nothing(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    config = config_in(tmp_path / "run", f"train.compile={str(compiles).lower()}")
    with built(config, cluster_of(single_rank_channel())).saves:
        assert (token_loss in compiled) == compiles
        assert len(compiled) == (1 + config.model.n_layer if compiles else 0)
