"""State that a load was not given, and options that it replaced: one line names each, unless the call declines it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict

Loop = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


def loop() -> Loop:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return model, optimizer, {"scheduler": scheduler, "epoch": 3, "ema": nn.Linear(2, 2), "losses": [torch.ones(2)]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model, optimizer, state = loop()
    return save(tmp_path, model, optimizer, iteration=1, state=state, per_rank={"position": 4}, rng=True)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_forgotten_state_is_named_in_one_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = loop()
    found = load(path, model, optimizer)
    (line,) = lines(caplog)
    assert str(path) in line
    for name in ("random state (rng=)", "position (per_rank=)", "scheduler (state=)", "ema (state=)"):
        assert line.count(name) == 1
    assert found["epoch"] == 3
    assert "epoch" not in line


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rng": False}, ["position", "scheduler", "ema"]),
        ({"state": {}, "per_rank": {}}, ["random state"]),
        ({"state": {"epoch": 0}, "per_rank": {}, "rng": False}, ["scheduler", "ema"]),
    ],
)
def test_what_is_left_out_otherwise_is_named(
    path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], named: list[str]
) -> None:
    model, optimizer, _ = loop()
    load(path, model, optimizer, **given)
    (line,) = lines(caplog)
    names = ("random state", "position", "scheduler", "epoch", "ema", "losses")
    assert {name for name in names if f"{name} (" in line} == {*named}


def test_a_state_dict_with_an_optimizer_names_the_rest(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = loop()
    load_state_dict(path, {"model": model})
    assert not lines(caplog)
    load_state_dict(path, {"model": model, "optimizer": optimizer, "ema": nn.Linear(2, 2)})
    (line,) = lines(caplog)
    assert all(f" {key}" in line for key in ("scheduler", "epoch", "losses", "per_rank"))
    assert " ema" not in line


@pytest.mark.parametrize(
    ("saved", "given", "named"),
    [
        ({"foreach": True}, {"foreach": False}, ["foreach=True for False"]),
        ({"fused": True}, {}, ["fused=True for None"]),
        ({}, {"capturable": True, "amsgrad": True}, ["capturable=False for True", "amsgrad=False for True"]),
        ({"lr": 0.5, "betas": (0.5, 0.5)}, {"lr": 0.25}, []),
    ],
)
def test_options_that_a_load_replaces_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: dict[str, Any], given: dict[str, Any], named: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": module.parameters()} for module in model]
    path = save(tmp_path, model, torch.optim.AdamW(groups, **saved), iteration=1)
    groups = [{"params": module.parameters()} for module in model]
    load(path, model, again := torch.optim.AdamW(groups, **given))
    assert again.param_groups[1]["foreach"] == saved.get("foreach")
    assert len(lines(caplog)) == bool(named)
    assert all(line.count(name) == 1 for line in lines(caplog) for name in named)
    caplog.clear()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.named_parameters(), **given).state_dict()}
    load_state_dict(save_state_dict(tmp_path / "dict", state, iteration=1), state)
    assert not lines(caplog)


def test_what_is_given_or_meant_is_not_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, state = loop()
    load(path, model, optimizer, state=state, per_rank={"position": 0}, rng=True)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert load(path, model, optimizer, state={}, per_rank={}, rng=False)["epoch"] == 3
    load(path, model, optimizer, state={}, per_rank=(own := {"position": 0}), rng=False)
    assert own == {"position": 4}
    assert torch.equal(torch.rand(2), expected)
    load(save(path.parent, model, optimizer, iteration=2), model)  # the weights alone
    load(path.parent / "none", model, optimizer, missing_ok=True)
    assert not lines(caplog)
