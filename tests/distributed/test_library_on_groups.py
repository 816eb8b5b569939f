"""State dicts of several ranks: pipeline stages, groups of ranks with any coordinator, ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reprise import AsyncSaver, load, load_state_dict, save_state_dict
from reprise.errors import TrainerError
from reprise.nested.calls import _known
from tests.distributed.test_ranks_that_disagree import process_group, refused
from tests.harness import call_on_ranks

State = dict[str, Any]


def run(function: Callable[[list[str]], None], folder: Path, *, ranks: int = 2) -> str:
    """Call a function of this module on ranks and return what they printed."""
    ended = call_on_ranks(function, [str(folder)], folder=folder / "ranks", ranks=ranks, timeout_s=60.0)
    assert ended.ok, ended.text
    return ended.text


class Model(nn.Module):
    """Layers named by their number in the whole model, or some of them."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def trained(*numbers: int, fill: float = 0.0) -> tuple[Model, torch.optim.Optimizer]:
    """Return a model after a step in which the gradient of a layer depends on its number alone."""
    model = Model(*numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float(name.split(".")[1]) + 1 + fill)
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    ema = {name: 2 * value for name, value in model.state_dict().items()}
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "ema": ema,
        "epoch": 3,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


STAGES = ((0, 2), (1, 3, 10))  # interleaved, as two virtual stages on each rank


def save_stages(arguments: list[str]) -> None:
    """Save the stages, load them exchanged, and see that only the first save exchanges tables."""
    with process_group() as rank:
        state = state_of(*trained(*STAGES[rank]))
        counts = []
        for iteration in (1, 2, 3):
            save_state_dict(arguments[0], state, iteration=iteration)
            counts.append(next(found.exchanged for (kind, _), found in _known.items() if kind == "save"))
        assert counts == [1, 1, 1], counts
        other = state_of(*trained(*STAGES[1 - rank], fill=9.0))
        load_state_dict(arguments[0], other)
        assert same(other, state_of(*trained(*STAGES[1 - rank])))
        # A new table on one rank is exchanged again, and no table of the other.
        if rank:
            state["ema"]["more"] = torch.ones(1)
        save_state_dict(arguments[0], state, iteration=4)
        assert next(found.exchanged for (kind, _), found in _known.items() if kind == "save") == 2


def test_stages_save_whole_and_load_on_one_rank(tmp_path: Path) -> None:
    run(save_stages, tmp_path)
    numbers = sorted(number for stage in STAGES for number in stage)
    whole = state_of(*trained(*numbers, fill=5.0))
    whole["epoch"], whole["optimizer"]["param_groups"][0]["lr"] = 0, 9.0
    load_state_dict(tmp_path / "iter_0000003", whole)
    expected = state_of(*trained(*numbers))
    assert same(whole, expected)
    # One rank with all keys writes the same tensor files.
    save_state_dict(tmp_path / "alone", expected, iteration=3)
    for name in ("model.safetensors", "optimizer/optimizer-00001-of-00001.safetensors"):
        a, b = (folder / "iter_0000003" / name for folder in (tmp_path, tmp_path / "alone"))
        assert a.read_bytes() == b.read_bytes()


def save_two_of_three(arguments: list[str]) -> None:
    """Let ranks 1 and 2 save, with rank 2 as coordinator, while rank 0 computes and passes their end only later."""
    folder = Path(arguments[0])
    with process_group() as rank:
        group = dist.new_group([1, 2])
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            model, optimizer = trained(0)
            while not store.check(["saved"]):  # the save ends while this rank does not stop
                model(torch.ones(1, 6)).sum().backward()
                optimizer.step()
            refused_on_outsider(folder, group)
            return
        state = {"model": {f"w{rank}": torch.full((5,), float(rank)), "both": torch.arange(4.0)}, "ranks": [1, 2]}
        save_state_dict(folder, state, iteration=1, process_group=group, coordinator_rank=2)
        with AsyncSaver(folder, process_group=group, coordinator_rank=2, max_checkpoint_keep=1) as saver:
            saver.prepare_state_dict(state)
            saver.save_state_dict(2, state)
        again = {"model": {f"w{3 - rank}": torch.zeros(5), "both": torch.zeros(4)}, "ranks": []}
        load_state_dict(folder, again, process_group=group, coordinator_rank=1)
        other = {f"w{3 - rank}": torch.full((5,), float(3 - rank)), "both": torch.arange(4.0)}
        assert same(again, {"model": other, "ranks": [1, 2]})
        for odd in (rank, torch.full((3,), rank)):
            given: State = {"process_group": group, "coordinator_rank": 2}
            refused(lambda odd=odd, given=given: save_state_dict(folder, {"a": odd}, iteration=3, **given))
        dist.barrier(group)
        if rank == 2:
            store.set("saved", "")


def refused_on_outsider(folder: Path, group: Any) -> None:
    for given in ({"process_group": group}, {"coordinator_rank": 3}):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            save_state_dict(folder, {"a": 1}, iteration=1, **given)
        print(f"[{type(caught.value).__name__}] {caught.value}", flush=True)


def test_two_of_three_ranks_save_while_the_third_computes(tmp_path: Path) -> None:
    text = run(save_two_of_three, tmp_path, ranks=3)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]
    assert set(load_file(tmp_path / "iter_0000002/model.safetensors")) == {"both", "w1", "w2"}
    assert "The ranks give different values (/a)" in text
    assert "1 on rank 1 and 2 on rank 2" in text
    assert "found /a; rank 1 against rank 2." in text
    assert text.count("[ReplicaError]") == 1
    assert "[ConfigError] This rank is not in the process group (rank 0)" in text
    assert "expected one of its ranks: 0, 1, 2, found coordinator_rank=3. Set coordinator_rank=0" in text


def save_shards(arguments: list[str]) -> None:
    """Save FSDP2 shards under a nested name with a plain tensor and a replicated DTensor beside them; load at once."""
    with process_group() as rank:
        model, _ = trained(0, 1)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        mesh = init_device_mesh("cpu", (2,))
        more = {
            "plain": torch.arange(5),
            "copy": distribute_tensor(torch.arange(6.0), mesh, [Replicate()]),
            "cut": distribute_tensor(torch.arange(14.0).reshape(2, 7), mesh, [Shard(1)]),
        }
        state = {**state_of(model, optimizer), "more": more}
        path = save_state_dict(arguments[0], state, iteration=1)
        again = {**state_of(model, optimizer), "more": {name: torch.zeros_like(t) for name, t in more.items()}}
        for group in (again["model"], again["ema"]):
            for tensor in group.values():
                tensor.zero_()
        load_state_dict(path, again)
        for name, tensor in again["more"].items():
            full = tensor if name == "plain" else tensor.full_tensor()
            assert torch.equal(full.flatten(), torch.arange(full.numel(), dtype=full.dtype)), name
        # A forward without gradients leaves gathered parameters, which a load into older state does not reach.
        for given in ({"model": model}, {}):
            model.layers["0"].bias.data.to_local().fill_(7.0)
            stale = {"model": get_model_state_dict(model)}
            with torch.no_grad():
                model(torch.ones(2, 6))
            load_state_dict(path, stale if given else {"model": get_model_state_dict(model)}, **given)
            with torch.no_grad():
                outputs = model(torch.ones(2, 6))
            model.reshard()
            with torch.no_grad():
                assert torch.equal(model(torch.ones(2, 6)), outputs)
            model.reshard()
        # A part of a tensor is no checkpoint: rank 0 alone has half of it.
        group = dist.new_group([0])
        if rank == 0:
            refused(lambda: save_state_dict(arguments[0], {"cut": more["cut"]}, iteration=2, process_group=group))
        state["model"]["layers.0.bias"] = torch.zeros(6) if rank else torch.zeros(7)
        refused(lambda: save_state_dict(arguments[0], state, iteration=2))
        refused(lambda: save_state_dict(arguments[0], {"a": torch.full((3,), float(rank))}, iteration=2))
        save_state_dict(arguments[0], {"a": torch.full((3,), float(rank))}, iteration=2, from_rank0=["/a"])
        refused(lambda: save_state_dict(arguments[0], {"a": torch.ones(1)}, iteration=3, from_rank0=["a"]))
        refused(lambda: save_state_dict(arguments[0], {"a": torch.ones(1)}, iteration=3, from_rank0=["a"] * rank))
        refused(lambda: save_state_dict(arguments[0], {"a": object() if rank else 1}, iteration=3))
        tied = torch.ones(3)
        odd = {"a": tied, "b": tied.clone() if rank else tied}
        refused(lambda: save_state_dict(arguments[0], odd, iteration=3))


def test_shards_and_replicas_of_a_state_dict(tmp_path: Path) -> None:
    text = run(save_shards, tmp_path)
    assert "The ranks do not hold a tensor exactly once, found /cut: 8 of 14 elements on ranks 0." in text
    assert "layers.0.bias is F32 [7] (model) on rank 0 and F32 [6] (model) on rank 1" in text
    assert "[ReplicaError] Replicas of the same tensor hold different bits" in text
    assert "A pattern in from_rank0 fits no tensor, found a." in text
    assert "The ranks give different from_rank0, expected the same on every rank, found [] on rank 0 and ['a']" in text
    assert "neither a tensor nor of a type that a checkpoint holds (/a)" in text
    assert "/b is tied to /a on rank 0 and a tensor of its own on rank 1" in text
    assert load_file(tmp_path / "iter_0000002/extra/extra-00001-of-00001.safetensors")["/a"].tolist() == [0.0] * 3
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]


class Summing:
    """An object that communicates when it gives and takes its state: its calls meet on all ranks or wait for ever."""

    def __init__(self, number: int) -> None:
        self.number, self.sums = number, [0]

    def state_dict(self) -> State:
        return {"sum": self.total()}

    def load_state_dict(self, state: State) -> None:
        self.sums = [state["sum"], self.total()]

    def total(self) -> int:
        found = torch.tensor(self.number)
        dist.all_reduce(found)
        return int(found)


def give_objects_in_any_order(arguments: list[str]) -> None:
    with process_group() as rank:
        objects = {"b": Summing(10), "a": Summing(1)}
        given = dict(reversed(objects.items())) if rank else objects
        save_state_dict(arguments[0], given, iteration=1)
        load_state_dict(arguments[0], given)
        assert (objects["a"].sums, objects["b"].sums) == ([2, 2], [20, 20])


def test_objects_communicate_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    run(give_objects_in_any_order, tmp_path)


def name_other_coordinators(arguments: list[str]) -> None:
    with process_group() as rank, pytest.raises(Exception, match="coordinator"):
        save_state_dict(arguments[0], {"a": 1}, iteration=1, coordinator_rank=rank)


def test_ranks_that_name_other_coordinators_do_not_wait(tmp_path: Path) -> None:
    run(name_other_coordinators, tmp_path)
    assert not list(tmp_path.glob("iter_*"))


def raises(call: Callable[[], object]) -> None:
    with pytest.raises(TrainerError) as caught:
        call()
    print(caught.value, flush=True)


def fail_early_on_rank_1(arguments: list[str]) -> None:
    """Give what rank 1 alone can see to be wrong: every rank raises, and the calls after are matched again."""
    with process_group() as rank:
        endless: State = {}
        endless["more"] = endless
        folder, good = arguments[0], {"a": torch.ones(1)}
        raises(lambda: save_state_dict(folder, good, iteration=1, coordinator_rank=5 * rank))
        raises(lambda: save_state_dict(folder, endless if rank else good, iteration=1))
        raises(lambda: save_state_dict(folder, {"\ud800": torch.ones(1)} if rank else good, iteration=1))
        raises(lambda: save_state_dict(None if rank else folder, good, iteration=1))  # type: ignore[arg-type]
        save_state_dict(folder, good, iteration=2)
        raises(lambda: load_state_dict(None if rank else folder, good))  # type: ignore[arg-type]
        raises(lambda: load_state_dict(folder, good, coordinator_rank=5 * rank))
        load_state_dict(folder, good)


def test_a_rank_that_fails_early_leaves_none_waiting(tmp_path: Path) -> None:
    text = run(fail_early_on_rank_1, tmp_path)
    for message in ("coordinator_rank=5", "nested too deeply", "cannot be stored as UTF-8", "The path is invalid"):
        assert text.count(message) >= 2, message
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


def fail_in_the_background(arguments: list[str]) -> None:
    """Let a save fail on rank 1 alone: every rank hears of it at its next call, and the one after is good."""
    from tests.fakes import FailingFiles

    with process_group() as rank:
        model, optimizer = trained(0)
        files = FailingFiles("write") if rank else None
        with AsyncSaver(arguments[0], coordinator_rank=1, files=files) as saver:
            saver.save(1, model, optimizer)
            refused(lambda: saver.save(2, model, optimizer))
            if files is not None:
                files.is_armed = False
            saver.save_state_dict(3, state_of(model, optimizer))
            optimizer.step()


def test_a_failure_of_one_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    text = run(fail_in_the_background, tmp_path)
    assert text.count("errno 5") >= 2
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]
    whole = state_of(*trained(0, fill=5.0))
    load_state_dict(tmp_path, whole)
    assert same(whole, state_of(*trained(0)))


def change_ddp_after_the_call(arguments: list[str]) -> None:
    """Clip the weights, let DDP's forward pass change buffers, and step, before a byte of a save is written."""
    from tests.unit.reprise.saving.test_background import Gate

    with process_group():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        optimizer, gate = torch.optim.AdamW(model.parameters(), lr=0.1), Gate(0)

        def train() -> None:
            model(torch.arange(24.0).reshape(4, 6)).square().sum().backward()
            optimizer.step()

        train()
        expected = {name: value.clone() for name, value in model.module.state_dict().items()}
        with AsyncSaver(arguments[0], files=gate) as saver:
            saver.save(1, model.module, optimizer)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)
            train()
            gate.opened.set()
        assert not any(torch.equal(value, expected[name]) for name, value in model.module.state_dict().items())
        again = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        load(arguments[0], again, torch.optim.AdamW(again.parameters()))
        assert same(dict(again.state_dict()), expected)


def test_what_ddp_changes_after_a_call_is_not_saved(tmp_path: Path) -> None:
    run(change_ddp_after_the_call, tmp_path)
