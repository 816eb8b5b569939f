"""`save` and `load` on somebody else's model and optimizer; what the four doors of a save have in common."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reprise
from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, ConfigError, MismatchError
from reprise.saving.checkpointer import Checkpointer
from tests import ROOT
from tests.messages import refused
from tests.states import Net, assert_same, groups, train

Maker = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
}


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, list[tuple[str, torch.Tensor]]]]:
    return [(name, sorted(optimizer.state.get(p, {}).items())) for name, p in sorted(model.named_parameters())]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_bitwise_in_another_parameter_order(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](groups(model))
    train(model, optimizer, 3)
    path = save(tmp_path, model, optimizer, iteration=3, state={"note": "hi", "list": [1, None]})
    assert path == tmp_path / "iter_0000003"
    other = Net(("odd", "norm", "embed", "frozen"))
    again = OPTIMIZERS[name](groups(other, reverse=True))
    assert load(tmp_path, other, again) == {"note": "hi", "list": [1, None], "iteration": 3}
    assert other.head.weight is other.embed.weight
    assert_same(sorted(model.state_dict().items()), sorted(other.state_dict().items()))
    assert_same(by_name(model, optimizer), by_name(other, again))
    assert [(g["lr"], g["weight_decay"]) for g in again.param_groups] == [(0.01, 0.0), (0.02, 0.1)]
    train(model, optimizer, 3)
    train(other, again, 3)
    assert_same(sorted(model.state_dict().items()), sorted(other.state_dict().items()))


def test_the_library_exports_its_names_and_no_others() -> None:
    code = (
        "import sys, reprise; print(dir(reprise) == sorted(['list', *reprise.__all__]), 'torch' in sys.modules)\n"
        "del sys, reprise\nfrom reprise import *\nprint(*sorted(globals()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    completion, names = ended.stdout.splitlines()
    assert completion == "True False"
    assert {name for name in names.split() if not name.startswith("__")} == set(reprise.__all__)
    assert "list" not in reprise.__all__  # Python's own stays
    lists = re.findall(r"^__all__ = (\[.*?\])$", Path(reprise.__file__).read_text(), re.DOTALL | re.MULTILINE)
    assert [*map(ast.literal_eval, lists)] == [reprise.__all__]  # a type checker evaluates nothing else
    assert all(callable(getattr(reprise, name)) for name in [*reprise.__all__, "list"])
    with pytest.raises(AttributeError, match="restore"):
        reprise.restore  # noqa: B018 - the access is the test


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "optimizer"):
        save(tmp_path, Net(), torch.optim.SGD(Net().parameters(), lr=0.1), iteration=1)


def test_state_of_no_parameter_is_refused_by_its_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"scale": torch.ones(())}  # type: ignore[index]
    with refused(CheckpointError, "'global'"):
        save(tmp_path, model, optimizer, iteration=1)


def test_the_optimizer_may_be_left_behind_but_not_invented(tmp_path: Path) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, 1)
    load(save(tmp_path / "both", model, optimizer, iteration=1), Net())
    path = save(tmp_path / "alone", model, iteration=1)
    with refused(MismatchError, str(path)):
        load(path, model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for result in (
        load(path, model, optimizer, strict=False),
        load_state_dict(path, {"model": model, "optimizer": optimizer}, strict=False),
    ):
        assert "/optimizer/param_groups/0" in result.missing_keys
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("saved", "given", "strict"),
    [("sgd momentum", "adamw", True), ("adamw", "sgd momentum", False), ("sgd", "adamw", False)],
)
def test_another_optimizer_s_state_is_refused_with_both_names(
    tmp_path: Path, saved: str, given: str, strict: bool
) -> None:
    model = Net()
    optimizer, other = OPTIMIZERS[saved](groups(model)), OPTIMIZERS[given](groups(model))
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer, iteration=1)
    before = copy.deepcopy(model.state_dict())
    with refused(MismatchError, type(other).__name__, type(optimizer).__name__):
        load(tmp_path, model, other, strict=strict)
    assert_same(model.state_dict(), before)
    assert not other.state
    train(model, other, 1)


def test_differing_tensors_are_all_listed_and_none_is_filled(tmp_path: Path) -> None:
    save(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), iteration=1)
    target = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16), nn.Linear(2, 2))
    before = copy.deepcopy(target.state_dict())
    with refused(MismatchError, f"{tmp_path}/iter_0000001") as caught:
        load(tmp_path, target)
    assert [" ".join(line.split()[:3]) for line in str(caught.value.found).split("; ")] == [
        "0.weight has shape", "0.bias has shape", "1.weight has dtype", "2.weight is missing", "2.bias is missing",
        "1.bias is unexpected",
    ]  # fmt: skip
    with refused(MismatchError, "31 more"):
        load(tmp_path, nn.ParameterList(torch.zeros(1) for _ in range(47)))
    assert_same(target.state_dict(), before)
    with refused(MismatchError, "0.weight"):
        load(tmp_path, target, strict=False)


def test_an_untied_weight_is_read_under_its_other_name(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path, model, iteration=1)
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(11, 8))
    load(tmp_path, untied)
    assert torch.equal(untied.head.weight, model.embed.weight)


def test_loading_never_unpickles(tmp_path: Path) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer, iteration=1)
    seen: list[str] = []
    is_watching = True

    def hook(event: str, _args: object) -> None:
        if is_watching and (event in ("pickle.find_class", "marshal.loads", "exec")):
            seen.append(event)

    sys.addaudithook(hook)
    load(tmp_path, model, optimizer)
    is_watching = False
    assert seen == []


# The doors of a save: a folder, an iteration, a model, further state, and options of the function or of the saver.


def _by_saver(folder: Path, iteration: int, model: nn.Module, state: dict[str, Any], **options: Any) -> None:
    with AsyncSaver(folder, **options) as saver:
        saver.save(iteration, model, state=state)


def _by_saver_of_dicts(folder: Path, iteration: int, model: nn.Module, state: dict[str, Any], **options: Any) -> None:
    with AsyncSaver(folder, **options) as saver:
        saver.save_state_dict(iteration, {"model": model, **state})


Door = Callable[..., object]
DOORS: dict[str, Door] = {
    "save": lambda folder, at, model, state, **options: save(folder, model, iteration=at, state=state, **options),
    "save_state_dict": lambda folder, at, model, state, **options: save_state_dict(
        folder, {"model": model, **state}, iteration=at, **options
    ),
    "AsyncSaver.save": _by_saver,
    "AsyncSaver.save_state_dict": _by_saver_of_dicts,
}
doors = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


def three(value: float) -> nn.Module:
    """Return a model of three weights of 400 bytes."""
    return nn.ParameterDict({f"w{number}": nn.Parameter(torch.full((100,), float(value))) for number in range(3)})


@doors
def test_file_bytes_divide_the_files(tmp_path: Path, door: Door) -> None:
    door(tmp_path, 1, three(7.0), {}, file_bytes=800)
    assert len(list(tmp_path.glob("iter_0000001/model-*.safetensors"))) == 2
    load(tmp_path, again := three(0.0))
    assert all(bool((value == 7).all()) for value in again.values())


@doors
def test_old_checkpoints_go_when_only_some_are_kept(tmp_path: Path, door: Door) -> None:
    for iteration in range(1, 5):
        door(tmp_path, iteration, three(iteration), {}, max_checkpoint_keep=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


@doors
def test_an_iteration_that_is_there_may_be_refused(tmp_path: Path, door: Door) -> None:
    door(tmp_path, 1, three(1), {}, overwrite=False)
    with refused(CheckpointError, "iter_0000001", "overwrite=True"):
        door(tmp_path, 1, three(1), {}, overwrite=False)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001"]
    door(tmp_path, 1, three(1), {})
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000001.superseded-1"]


INVALID = [
    *(("max_checkpoint_keep", value) for value in ("2", 1.5, True, None, -1)),
    *(("from_rank0", value) for value in ("*", "weight*", b"*", 3, [3], None)),
    ("file_bytes", 0),
]
LIMITS = [
    *(("staging_bytes", value) for value in ("1", -1)),
    ("stall_timeout_s", "x"),
    *(("commit_timeout_s", value) for value in (0, math.nan)),
]


@pytest.mark.parametrize(
    ("door", "option"),
    [*itertools.product([save, save_state_dict, _by_saver], INVALID), *((_by_saver, limit) for limit in LIMITS)],
)
def test_an_option_is_checked_before_anything_is_written(
    tmp_path: Path, door: Door, option: tuple[str, object]
) -> None:
    options = dict([option])
    with refused(ConfigError, option[0]):
        if door is _by_saver:
            door(tmp_path, 1, three(1), {}, **options)
        else:
            door(tmp_path, {"a": 1} if door is save_state_dict else three(1), iteration=1, **options)
    assert list(tmp_path.iterdir()) == []


@doors
@pytest.mark.parametrize("iteration", [-1, 1.0, True, 2**63])
def test_an_iteration_that_no_load_would_find_is_refused(tmp_path: Path, door: Door, iteration: int) -> None:
    with refused(CheckpointError, str(iteration)):
        door(tmp_path, iteration, three(1), {})
    assert not list(tmp_path.glob("iter_*"))


@doors
def test_a_url_is_no_checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Door) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError, "s3://bucket/run"):
        door("s3://bucket/run", 1, three(1), {})
    assert list(tmp_path.iterdir()) == []


@doors
def test_a_value_of_no_plain_type_is_named_by_its_keys(tmp_path: Path, door: Door) -> None:
    for value in (len, {torch.zeros(1)}, object(), defaultdict(int), defaultdict(int, {2: 1})):
        with refused(CheckpointError, "/a/b/2"):
            door(tmp_path, 1, three(1), {"a": {"b": [0, 1, value]}})
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.parametrize("key", ["model", "optimizer", "per_rank"])
def test_state_under_a_name_of_the_library_is_refused(tmp_path: Path, key: str) -> None:
    with refused(CheckpointError, "`state`", key):
        save(tmp_path, nn.Linear(2, 2), iteration=1, state={key: 3})


def test_an_iteration_is_looked_for_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_folder = Checkpointer.take_folder

    def take_after_another_job(checkpointer: Checkpointer) -> None:
        monkeypatch.setattr(Checkpointer, "take_folder", take_folder)
        save(tmp_path, nn.Linear(2, 2), iteration=1)
        take_folder(checkpointer)

    monkeypatch.setattr(Checkpointer, "take_folder", take_after_another_job)
    with refused(CheckpointError, "iter_0000001"):
        save(tmp_path, nn.Linear(2, 2), iteration=1, overwrite=False)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_a_change_of_the_working_folder_changes_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(nn.Linear):
        """A module whose state is asked for from another folder."""

        def get_extra_state(self) -> int:
            monkeypatch.chdir(tmp_path / "away")
            return 1

        def set_extra_state(self, state: int) -> None:
            pass

    (tmp_path / "away").mkdir()
    model, path = Away(2, 2), tmp_path / "run" / "iter_0000001"
    for call, expected in (
        (lambda: save("run", model, iteration=1), path),
        (lambda: load("run", model)["iteration"], 1),
        (lambda: reprise.latest("run"), path),
        (lambda: reprise.list("run")[0].path, path),
        (lambda: _by_saver("run", 2, model, {}), None),  # type: ignore[func-returns-value,arg-type]
    ):
        monkeypatch.chdir(tmp_path)
        assert call() == expected
    assert [path.name for path in (tmp_path / "away").iterdir()] == []
