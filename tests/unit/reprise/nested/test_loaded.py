"""What a lenient load keeps, and the lines about state that a load was not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import MismatchError
from tests.messages import refused

Loop = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_alone_may_differ(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save(tmp_path, model, trained(model), iteration=1)
    again = trained(other := nn.Linear(2, 2), amsgrad=True, lr=0.5)
    kept = again.state[other.weight]["max_exp_avg_sq"].clone()
    with refused(MismatchError, "max_exp_avg_sq.weight is missing"):
        load(path, other, again)
    found = load(path, other, again, strict=False)
    assert found.missing_keys == ["max_exp_avg_sq.weight", "max_exp_avg_sq.bias"]
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(again.state[other.weight]["max_exp_avg_sq"], kept)
    assert again.param_groups[0]["lr"] == 1e-3
    part = torch.optim.AdamW([other.weight])
    with refused(MismatchError, "exp_avg.bias is unexpected"):
        load(path, other, part)
    assert set(load(path, other, part, strict=False).unexpected_keys) >= {"exp_avg.bias", "exp_avg_sq.bias"}
    again.state[other.weight]["exp_avg"] = torch.zeros(3)
    with refused(MismatchError, "exp_avg.weight has shape [2, 2]"):
        load(path, other, again, strict=False)


@pytest.mark.parametrize(("saved", "loaded", "problem"), [(1, 2, "missing"), (2, 1, "unexpected")])
def test_a_module_in_state_may_not_differ(tmp_path: Path, saved: int, loaded: int, problem: str) -> None:
    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))

    path = save(tmp_path, model := nn.Linear(2, 2), iteration=1, state={"ema": layers(saved)})
    with refused(MismatchError, f"/ema/1.weight is {problem}"):
        load(path, model, state={"ema": layers(loaded)})


# How strict a load is, and what it says of `b` and `/own/c`, which the load lacks, and of `w` and `/run`.
ALL = ["w is missing", "/run is missing", "b is unexpected", "/own/c is unexpected"]
STRICT: dict[Any, list[str]] = {True: ALL, "missing": ALL[:2], False: []}


@pytest.mark.parametrize("strict", STRICT)
def test_names_that_a_side_lacks_are_refused_or_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: Any
) -> None:
    saved = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "own": {"epoch": 3, "c": 1}, "left": {"out": 1}}
    path = save_state_dict(tmp_path, saved, iteration=1)
    target: dict[str, Any] = {"model": {"a": torch.zeros(2), "w": torch.ones(2)}, "own": {"epoch": 0}, "run": 7}
    before = repr(target)
    if STRICT[strict]:
        with refused(MismatchError, *STRICT[strict]) as caught:
            load_state_dict(path, target, strict=strict)
        assert str(caught.value).count(" is ") == len(STRICT[strict])
        assert repr(target) == before
    own, part = {"own": {"epoch": 0}, "run": 7}, {"own": {"epoch": 0}}
    allowed = {True: [], "missing": [part], False: [part, own, target]}
    for given in allowed[strict]:
        caplog.clear()
        found = load_state_dict(path, given, strict=strict)
        assert given["own"] == {"epoch": 3}
        missing = [name for name, key in (("w", "model"), ("/run", "run")) if key in given]
        unexpected = ["/own/c"] + ["b"] * ("model" in given)
        assert (found.missing_keys, found.unexpected_keys) == (missing, unexpected)
        lines = [", ".join(names) for names in (unexpected, missing) if names]
        assert [record.message.rpartition(": ")[2] for record in caplog.records] == lines
    if strict is False:
        target["model"]["a"] = torch.zeros(3)
        with refused(MismatchError, "a has shape [2]"):
            load_state_dict(path, target, strict=False)


# What is passed in another kind's place, and the names that are missing and unexpected.
KINDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"tensor": 5}, "/tensor", ["/tensor"]),
    ({"value": torch.zeros(2)}, "/value", ["/value"]),
    ({"model": {"w": 5}}, "/model/w", ["w"]),
    ({"dict": torch.zeros(2)}, "/dict", ["/dict/tensor", "/dict/value"]),
]


@pytest.mark.parametrize(("given", "missing", "unexpected"), KINDS, ids=["value", "tensor", "weight", "dict"])
def test_another_kind_under_a_name_is_missing_and_unexpected(
    tmp_path: Path, given: dict[str, Any], missing: str, unexpected: list[str]
) -> None:
    own, inner = ({"tensor": torch.ones(2), "value": 3} for _ in range(2))
    path = save_state_dict(tmp_path, {**own, "dict": inner, "model": {"w": torch.ones(2)}}, iteration=1)
    with refused(MismatchError, f"{missing} is missing", *(f"{name} is unexpected" for name in unexpected)):
        load_state_dict(path, given)
    found = load_state_dict(path, given, strict=False)
    assert (found.missing_keys, sorted(found.unexpected_keys)) == ([missing], unexpected)


def loop() -> Loop:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"scheduler": scheduler, "epoch": 3, "ema": nn.Linear(2, 2), "losses": [torch.ones(2)], "tags": {}}
    return model, optimizer, state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model, optimizer, state = loop()
    return save(tmp_path, model, optimizer, iteration=1, state=state, per_rank={"position": 4}, rng=True)


# What a load is given beside the model and the optimizer, and the state that the line names.
GIVEN: list[tuple[dict[str, Any], list[str]]] = [
    ({"rng": False}, ["scheduler", "ema", "position"]),
    ({"state": {}, "per_rank": {}}, ["rng"]),
    ({"state": {"epoch": 0}, "per_rank": {"position": 0}, "rng": False}, ["scheduler", "ema"]),
    ({"state": loop()[2], "per_rank": {"position": 0}, "rng": True}, []),
    ({"state": {}, "per_rank": {}, "rng": False}, []),
]


@pytest.mark.parametrize(("given", "named"), GIVEN)
def test_state_that_is_neither_given_nor_declined_is_named(
    path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], named: list[str]
) -> None:
    model, optimizer, _ = loop()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert load(path, model, optimizer, **given)["epoch"] == 3
    assert torch.equal(torch.rand(2), expected) != bool(given.get("rng"))
    assert len(caplog.messages) == bool(named)
    assert [line.split("request: ")[1].split(";")[0].split(", ") for line in caplog.messages] == [named][: bool(named)]
    load(save(path.parent, model, optimizer, iteration=2), model)  # the weights alone
    load(path.parent / "none", model, optimizer, missing_ok=True)
    assert len(caplog.messages) == bool(named)


def test_a_state_dict_with_an_optimizer_names_the_rest(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = loop()
    load_state_dict(path, {"model": model})
    assert not caplog.messages
    load_state_dict(path, {"model": model, "optimizer": optimizer, "ema": nn.Linear(2, 2)})
    (line,) = caplog.messages
    assert {*line.split("request: ")[1].split(", ")} == {"scheduler", "epoch", "losses", "tags", "rng", "position"}
