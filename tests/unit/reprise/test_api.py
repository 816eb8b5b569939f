"""`save` and `load` on somebody else's model and optimizer."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import reprise
from reprise import load, save
from reprise.checkpointer import Checkpointer
from reprise.errors import CheckpointError, ConfigError, MismatchError
from tests import ROOT
from tests.harness import DEADLINE_S

Maker = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
}


class Net(nn.Module):
    """A user's module: buffers, a tied weight, a frozen parameter, one that is not contiguous."""

    embed: nn.Embedding
    norm: nn.BatchNorm1d
    frozen: nn.Parameter
    odd: nn.Parameter
    head: nn.Linear

    def __init__(self, order: tuple[str, ...] = ("embed", "norm", "frozen", "odd")) -> None:
        super().__init__()
        parts: dict[str, nn.Module | nn.Parameter] = {
            "embed": nn.Embedding(11, 8),
            "norm": nn.BatchNorm1d(8),
            "frozen": nn.Parameter(torch.randn(8), requires_grad=False),
            "odd": nn.Parameter(torch.randn(8, 5).T),
        }
        for name in order:
            setattr(self, name, parts[name])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids)) + self.frozen
        loss: torch.Tensor = self.head(hidden).square().mean() + (hidden @ self.odd.T).square().mean()
        return loss


def groups(model: nn.Module, *, reverse: bool = False) -> list[dict[str, object]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if name in ("odd", "embed.weight")]
    others = [p for name, p in named if name not in ("odd", "embed.weight")]
    found: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": 0.1, "lr": 0.02},
        {"params": others, "weight_decay": 0.0},
    ]
    if not reverse:
        return found
    return [{"params": list(reversed(g["params"]))} for g in reversed(found)]  # type: ignore[call-overload]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        ids = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(step))
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value.clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (value.dtype, value.shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(value, b[name]), name


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
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    assert_equal(by_name(model, optimizer), by_name(other, again))
    assert [(g["lr"], g["weight_decay"]) for g in again.param_groups] == [(0.01, 0.0), (0.02, 0.1)]
    train(model, optimizer, 3)
    train(other, again, 3)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_the_library_exports_its_names_and_no_others() -> None:
    code = "def before(): ...\nfrom reprise import *\nprint(*sorted(set(globals()) - {'before'}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name for name in ended.stdout.split() if not name.startswith("__")}
    assert names == set(reprise.__all__)
    assert "list" not in names  # Python's own stays
    assert all(callable(getattr(reprise, name)) for name in [*names, "list"])
    assert set(dir(reprise)) >= {*names, "list"}
    with pytest.raises(AttributeError, match="has no attribute 'restore'"):
        reprise.restore  # noqa: B018 - the access is the test


def test_load_into_a_running_optimizer_replaces_its_state(tmp_path: Path) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, 2)
    expected = copy.deepcopy((dict(model.state_dict()), by_name(model, optimizer)))
    save(tmp_path, model, optimizer, iteration=2)
    train(model, optimizer, 3)
    load(tmp_path, model, optimizer)
    assert_equal(dict(model.state_dict()), expected[0])
    assert_equal(by_name(model, optimizer), expected[1])


def test_safetensors_opens_the_file_as_the_state_dict(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path, model, iteration=1)
    found = load_file(path / "model.safetensors")
    expected = dict(model.state_dict())
    del expected["head.weight"]  # tied: stored once
    assert_equal({k: found[k] for k in sorted(found)}, {k: expected[k] for k in sorted(expected)})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint16, torch.bool,
        torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_every_dtype_passes_through_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def module(seed: int) -> nn.Module:
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        holder = nn.Module()
        holder.register_buffer("x", raw.view(dtype).clone())
        holder.register_buffer("scalar", raw[:8].view(dtype)[0].clone())
        return holder

    first, second = module(1), module(2)
    save(tmp_path, first, iteration=1)
    load(tmp_path, second)
    for name in ("x", "scalar"):
        a, b = getattr(first, name), getattr(second, name)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_a_dtype_without_a_form_in_files_is_refused_by_name(tmp_path: Path) -> None:
    holder = nn.Module()
    holder.register_buffer("packed", torch.empty(3, dtype=torch.uint4))
    with pytest.raises(CheckpointError, match=r"packed.*uint4"):
        save(tmp_path, holder, iteration=1)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the model's"):
        save(tmp_path, Net(), torch.optim.SGD(Net().parameters(), lr=0.1), iteration=1)


@pytest.mark.parametrize("value", [len, {torch.zeros(1)}, object(), defaultdict(int), defaultdict(int, {2: 1})])
def test_a_state_that_no_load_returns_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"tensor|a dict of a class.* \(`state`, /loss\).*found defaultdict"):
        save(tmp_path, Net(), iteration=1, state={"loss": value})
    assert list(tmp_path.glob("iter_*")) == []


@pytest.mark.parametrize("iteration", [-1, 1.0, True, 2**63])
def test_an_iteration_that_no_load_would_find_is_refused(tmp_path: Path, iteration: int) -> None:
    with pytest.raises(CheckpointError, match=f"expected an int of 0 or more, found {iteration}"):
        save(tmp_path, Net(), iteration=iteration)
    assert list(tmp_path.iterdir()) == []


def test_the_optimizer_may_be_left_behind_but_not_invented(tmp_path: Path) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, 1)
    save(tmp_path / "both", model, optimizer, iteration=1)
    load(tmp_path / "both", Net())
    save(tmp_path / "alone", model, iteration=1)
    with pytest.raises(MismatchError, match="without an optimizer"):
        load(tmp_path / "alone", model, optimizer)


@pytest.mark.parametrize(("saved", "given"), [("sgd momentum", "adamw"), ("adamw", "sgd momentum"), ("sgd", "adamw")])
@pytest.mark.parametrize("strict", [True, False])
def test_another_optimizer_s_state_is_refused_with_both_names(
    tmp_path: Path, saved: str, given: str, strict: bool
) -> None:
    model = Net()
    optimizer, other = OPTIMIZERS[saved](groups(model)), OPTIMIZERS[given](groups(model))
    train(model, optimizer, 1)
    save(tmp_path, model, optimizer, iteration=1)
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, model, other, strict=strict)
    assert f"expected {type(other).__name__}, found {type(optimizer).__name__}" in str(caught.value)
    assert_equal(dict(model.state_dict()), before)
    assert not other.state
    train(model, other, 1)


def test_differing_tensors_are_all_listed_and_none_is_filled(tmp_path: Path) -> None:
    save(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), iteration=1)
    target = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4, bias=False), nn.Linear(2, 2, bias=False))
    before = copy.deepcopy(dict(target.state_dict()))
    with pytest.raises(MismatchError) as caught:
        load(tmp_path, target)
    for part in ("0.weight has shape [4, 3]", "0.bias has shape", "2.weight is missing", "1.bias is unexpected"):
        assert part in str(caught.value)
    assert_equal(dict(target.state_dict()), before)
    with pytest.raises(MismatchError, match=r"0\.weight has shape"):
        load(tmp_path, target, strict=False)


def test_a_part_of_a_checkpoint_loads_when_not_strict(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    save(tmp_path, source, iteration=1)
    target = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(MismatchError, match=r"1\.weight is unexpected"):
        load(tmp_path, target)
    load(tmp_path, target, strict=False)
    assert_equal(dict(target.state_dict()), {f"0.{k}": v for k, v in source[0].state_dict().items()})


def test_a_load_that_is_not_strict_returns_the_missing_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = save(tmp_path, source, OPTIMIZERS["sgd"](source.parameters()), iteration=1, state={"epoch": 3})
    target = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    kept = copy.deepcopy(dict(target[2].state_dict()))
    with pytest.raises(MismatchError, match=r"2\.bias is missing; 2\.weight is missing; 1\.weight is unexpected"):
        load(path, target)
    found = load(path, target, strict=False)
    assert found == {"epoch": 3, "iteration": 1}
    assert (found.missing_keys, found.unexpected_keys) == (["2.bias", "2.weight"], ["1.weight", "1.bias"])
    assert caplog.records[1].message == f"not in {path}: 2 names, which keep their values: 2.bias, 2.weight"
    assert_equal(dict(target[2].state_dict()), kept)
    assert torch.equal(target[0].weight, source[0].weight)
    whole = load(path, source)
    assert (whole.missing_keys, whole.unexpected_keys) == ([], [])


def test_an_untied_weight_is_read_under_its_other_name(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path, model, iteration=1)
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(11, 8))
    load(tmp_path, untied)
    assert torch.equal(untied.head.weight, model.embed.weight)


def test_parameters_of_one_memory_are_stored_once_as_tied(tmp_path: Path) -> None:
    memory = torch.randn(3, 2)
    model = nn.ParameterDict({"a": nn.Parameter(memory), "b": nn.Parameter(memory)})
    path = save(tmp_path, model, iteration=1)
    assert list(load_file(path / "model.safetensors")) == ["a"]
    apart = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, 2)) for name in "ab"})
    load(tmp_path, apart)
    assert torch.equal(apart["a"], memory)
    assert torch.equal(apart["b"], memory)


def test_state_under_the_names_of_model_and_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stands for the model, the optimizer .*, found model"):
        save(tmp_path, nn.Linear(2, 2), iteration=1, state={"model": "tiny"})


def test_a_function_in_a_group_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "schedule": {1: len}}], lr=0.1)
    with pytest.raises(CheckpointError, match="/optimizer/param_groups/0/schedule/1"):
        save(tmp_path, model, optimizer, iteration=1)


def test_state_of_no_parameter_is_refused_by_its_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"scale": torch.ones(())}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="belongs to none of its parameters, found key 'global'"):
        save(tmp_path, model, optimizer, iteration=1)


def test_a_learning_rate_in_a_tensor_is_carried(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.025))
    save(tmp_path, model, optimizer, iteration=1)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    load(tmp_path, model, optimizer)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.025))


def test_a_load_that_is_not_strict_logs_omissions_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = OPTIMIZERS["adamw"](source.parameters())
    source(torch.ones(2)).sum().backward()
    optimizer.step()
    path = save(tmp_path, source, optimizer, iteration=1)
    load(tmp_path, nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), strict=False)
    assert not caplog.records  # the optimizer's state was not asked for
    load(tmp_path, nn.Sequential(nn.Linear(2, 2)), strict=False)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"not loaded from {path}: 6 tensors that nothing given has: 1.weight, 1.bias, 2.weight" in record.message
    caplog.clear()
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    load(tmp_path, target, OPTIMIZERS["adamw"](target.parameters()), strict=False)
    (record,) = caplog.records
    assert ": 8 tensors that nothing given has: 3.weight, 3.bias, exp_avg.3.weight" in record.message


def test_old_checkpoints_go_when_only_some_are_kept(tmp_path: Path) -> None:
    for iteration in range(1, 5):
        save(tmp_path, nn.Linear(2, 2), iteration=iteration, max_checkpoint_keep=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


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


def test_a_url_is_no_checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"A checkpoint folder is a URL.*found s3://bucket/run"):
        save("s3://bucket/run", nn.Linear(2, 2), iteration=1)
    assert list(tmp_path.iterdir()) == []


def test_completion_lists_the_public_names_without_torch() -> None:
    code = "import sys, reprise as c; assert 'torch' not in sys.modules; print(dir(c) == sorted(['list', *c.__all__]))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def test_a_value_of_no_plain_type_is_named_by_its_keys(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a tensor nor of a type.* \(/a/b/3/0\)"):
        save(tmp_path, nn.Linear(1, 1), iteration=1, state={"a": {"b": [0, 1, 2, {len}]}})
    with (
        reprise.AsyncSaver(tmp_path) as saver,
        pytest.raises(CheckpointError, match=r"neither a tensor nor of a type.* \(/rate\)"),
    ):
        saver.save(1, nn.Linear(1, 1), state={"rate": len})


def test_file_bytes_divide_the_files(tmp_path: Path) -> None:
    path = save(
        tmp_path, nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3))), iteration=1, file_bytes=800
    )
    assert len(list(path.glob("model-*.safetensors"))) == 2
    with pytest.raises(ConfigError, match="file_bytes is invalid, expected an int of 1 or more, found 0"):
        save(tmp_path, nn.Linear(2, 2), iteration=2, file_bytes=0)


def test_an_iteration_that_is_there_may_be_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, model, iteration=1, overwrite=False)
    for again in (
        lambda: save(tmp_path, model, iteration=1, overwrite=False),
        lambda: reprise.save_state_dict(tmp_path, {"a": 1}, iteration=1, overwrite=False),
    ):
        with pytest.raises(CheckpointError, match=r"there already \(.*iter_0000001\).*overwrite=True"):
            again()
    save(tmp_path, model, iteration=1)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000001.superseded-1"]


def test_an_iteration_is_looked_for_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_folder = Checkpointer.take_folder

    def take_after_another_job(checkpointer: Checkpointer) -> None:
        monkeypatch.setattr(Checkpointer, "take_folder", take_folder)
        save(tmp_path, nn.Linear(2, 2), iteration=1)
        take_folder(checkpointer)

    monkeypatch.setattr(Checkpointer, "take_folder", take_after_another_job)
    with pytest.raises(CheckpointError, match=r"there already \(.*iter_0000001\)"):
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
    monkeypatch.chdir(tmp_path)
    model = Away(2, 2)
    assert save("run", model, iteration=1) == tmp_path / "run" / "iter_0000001"
    monkeypatch.chdir(tmp_path)
    assert load("run", model)["iteration"] == 1
    monkeypatch.chdir(tmp_path)
    reprise.save_state_dict(Path("run"), {"model": model}, iteration=2)
    monkeypatch.chdir(tmp_path)
    assert reprise.load_state_dict(Path("run"), {"model": model})["iteration"] == 2
    monkeypatch.chdir(tmp_path)
    paths = [reprise.latest("run"), *(summary.path for summary in reprise.list("run"))]
    assert all(path is not None and path.is_absolute() for path in paths)
    assert [path.name for path in (tmp_path / "away").iterdir()] == []
