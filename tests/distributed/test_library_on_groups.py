"""State dicts of several ranks: pipeline stages, groups of ranks with any coordinator, ranks that disagree."""

from __future__ import annotations

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
from torch.distributed.tensor import Shard, distribute_tensor

from reprise import AsyncSaver, load_state_dict, save_state_dict
from reprise.errors import ConfigError, TrainerError
from reprise.ranks import StoreChannel
from tests.distributed.programs import Outcome, refused, run_programs
from tests.harness import tensor_files

State = dict[str, Any]


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


def save_stages(folder: Path, rank: int) -> None:
    """Save the stages, load them exchanged, and see that only the first save exchanges tables."""
    state = state_of(*trained(*STAGES[rank]))
    tables: list[str] = []
    put = StoreChannel.put

    def count(channel: StoreChannel, key: str, data: bytes, **options: bool) -> list[str]:
        tables.extend([key] if key.endswith("/documents") and b"F32" in data else [])
        return put(channel, key, data, **options)

    StoreChannel.put = count  # type: ignore[method-assign]
    for iteration in (1, 2, 3):
        save_state_dict(folder, state, iteration=iteration)
    assert len(tables) == rank, tables
    other = state_of(*trained(*STAGES[1 - rank], fill=9.0))
    load_state_dict(folder, other)
    assert same(other, state_of(*trained(*STAGES[1 - rank])))
    fresh = Model(*STAGES[1 - rank])
    load_state_dict(folder, {"model": fresh, "optimizer": (optimizer := torch.optim.AdamW(fresh.parameters()))})
    assert same(get_optimizer_state_dict(fresh, optimizer), other["optimizer"])
    # A new table on one rank is exchanged again, and no table of the other.
    tables.clear()
    if rank:
        state["ema"]["more"] = torch.ones(1)
    save_state_dict(folder, state, iteration=4)
    assert len(tables) == rank, tables
    # A tie on one rank, stored under its second name, is known to the other.
    save_state_dict(folder, {"b": (tied := torch.zeros(3)), "own": torch.ones(1)}, iteration=5)
    load_state_dict(folder, {"a": tied, "b": tied} if rank else {"own": torch.zeros(1)})


def save_two_of_three(folder: Path, rank: int) -> None:
    """Let ranks 1 and 2 save, with rank 2 as coordinator, while rank 0 computes and passes their end only later."""
    group = dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        model, optimizer = trained(0)
        while not store.check(["saved"]):  # the save ends while this rank does not stop
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        for given in ({"process_group": group}, {"coordinator_rank": 3}):
            refused(lambda given=given: save_state_dict(folder, {"a": 1}, iteration=1, **given), ConfigError)  # type: ignore[misc]
        return
    state = {"model": {f"w{rank}": torch.full((5,), float(rank)), "both": torch.arange(4.0)}, "ranks": [1, 2]}
    save_state_dict(folder, state, iteration=1, process_group=group, coordinator_rank=2)
    with AsyncSaver(folder, process_group=group, coordinator_rank=2, max_checkpoint_keep=1) as saver:
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


def save_shards(folder: Path, rank: int) -> None:
    """Save FSDP2 shards under a nested name with a DTensor beside them; load after a forward pass; be refused."""
    model, _ = trained(0, 1)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.arange(14.0).reshape(2, 7), mesh, [Shard(1)])
    state = {**state_of(model, optimizer), "cut": cut}
    path = save_state_dict(folder, state, iteration=1)
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
        refused(lambda: save_state_dict(folder, {"cut": cut}, iteration=2, process_group=group))
    state["model"]["layers.0.bias"] = torch.zeros(6) if rank else torch.zeros(7)
    refused(lambda: save_state_dict(folder, state, iteration=2))
    refused(lambda: save_state_dict(folder, {"a": torch.full((3,), float(rank))}, iteration=2))
    save_state_dict(folder, {"a": torch.full((3,), float(rank))}, iteration=2, from_rank0=["/a"] * (not rank))
    refused(lambda: save_state_dict(folder, {"a": object() if rank else 1}, iteration=3))
    tied = torch.ones(3)
    odd = {"a": tied, "b": tied.clone() if rank else tied}
    refused(lambda: save_state_dict(folder, odd, iteration=3))


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


def give_objects_in_any_order(folder: Path, rank: int) -> None:
    objects = {"b": Summing(10), "a": Summing(1)}
    given = dict(reversed(objects.items())) if rank else objects
    save_state_dict(folder, given, iteration=1)
    load_state_dict(folder, given)
    assert (objects["a"].sums, objects["b"].sums) == ([2, 2], [20, 20])


def count_messages(folder: Path, rank: int) -> None:
    """Save and load the same state several times: each time costs as few messages, and leaves one or two."""
    state, sent = {"a": torch.ones(4), "b": torch.full((3,), 2.0)}, list[str]()
    put, settle = StoreChannel.put, StoreChannel.settle
    store = dist.distributed_c10d._get_default_store()

    def count_put(channel: StoreChannel, key: str, data: bytes, **options: bool) -> list[str]:
        sent.append(key)
        return put(channel, key, data, **options)

    def count_settled(channel: StoreChannel, key: str, text: str) -> str:
        sent.append(key)
        return settle(channel, key, text)

    StoreChannel.put, StoreChannel.settle = count_put, count_settled  # type: ignore[method-assign]
    keys = list[int]()
    for iteration in (1, 2, 3, 4):
        sent.clear()
        save_state_dict(folder, state, iteration=iteration)
        assert len(sent) <= 4 + rank or iteration == 1, sent
        sent.clear()
        load_state_dict(folder, state)
        assert len(sent) <= 5, sent
        dist.barrier()
        keys.append(int(store.num_keys()))
        dist.barrier()
    # The decision on a save's call and that on the save itself, and a load's last answer.
    assert keys[3] - keys[2] == 3, keys
    StoreChannel.put, StoreChannel.settle = put, settle  # type: ignore[method-assign]


def name_other_coordinators(folder: Path, rank: int) -> None:
    refused(lambda: save_state_dict(folder, {"a": 1}, iteration=1, coordinator_rank=rank), TrainerError)


def fail_early_on_rank_1(folder: Path, rank: int) -> None:
    """Give what rank 1 alone can see to be wrong: every rank raises, and the calls after are matched again."""
    endless: State = {}
    endless["more"] = endless
    folder, good = folder, {"a": torch.ones(1)}
    refused(lambda: save_state_dict(folder, good, iteration=1, coordinator_rank=5 * rank), TrainerError)
    refused(lambda: save_state_dict(folder, endless if rank else good, iteration=1), TrainerError)
    refused(lambda: save_state_dict(folder, {"\ud800": torch.ones(1)} if rank else good, iteration=1), TrainerError)
    refused(lambda: save_state_dict(None if rank else folder, good, iteration=1), TrainerError)  # type: ignore[arg-type]
    save_state_dict(folder, good, iteration=2)
    refused(lambda: load_state_dict(None if rank else folder, good), TrainerError)  # type: ignore[arg-type]
    refused(lambda: load_state_dict(folder, good, coordinator_rank=5 * rank), TrainerError)
    load_state_dict(folder, good)


def fail_in_the_background(folder: Path, rank: int) -> None:
    """Let a save fail on rank 1 alone: every rank hears of it at its next call, and the one after is good."""
    from tests.fakes import FailingFiles

    model, optimizer = trained(0)
    files = FailingFiles("write") if rank else None
    with AsyncSaver(folder, coordinator_rank=1, files=files) as saver:
        saver.save(1, model, optimizer)
        refused(lambda: saver.save(2, model, optimizer))
        if files is not None:
            files.is_armed = False
        saver.save_state_dict(3, state_of(model, optimizer))
        optimizer.step()


ON_TWO = (
    save_stages,
    save_shards,
    give_objects_in_any_order,
    count_messages,
    name_other_coordinators,
    fail_early_on_rank_1,
    fail_in_the_background,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what became of each program; the programs themselves check what they load."""
    folder = tmp_path_factory.mktemp("groups")
    three = run_programs([save_two_of_three], folder / "three", ranks=3)
    return {**run_programs(ON_TWO, folder / "two"), **three}


def test_stages_save_whole_and_load_on_one_rank(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    folder = outcomes["save_stages"].folder
    numbers = sorted(number for stage in STAGES for number in stage)
    whole = state_of(*trained(*numbers, fill=5.0))
    whole["epoch"], whole["optimizer"]["param_groups"][0]["lr"] = 0, 9.0
    load_state_dict(folder / "iter_0000003", whole)
    expected = state_of(*trained(*numbers))
    assert same(whole, expected)
    # One rank with all keys writes the same tensor files.
    save_state_dict(tmp_path, expected, iteration=3)
    assert tensor_files(tmp_path / "iter_0000003") == tensor_files(folder / "iter_0000003")


def test_two_of_three_ranks_save_while_the_third_computes(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["save_two_of_three"]
    assert outcome.committed == ["iter_0000002"]
    assert set(load_file(outcome.folder / "iter_0000002/model.safetensors")) == {"both", "w1", "w2"}
    assert "1 on rank 1 and 2 on rank 2" in outcome.text
    assert "found /a; rank 1 against rank 2." in outcome.text
    assert outcome.text.count("[ReplicaError]") == 1
    assert "[ConfigError] This rank is not in the process group (rank 0)" in outcome.text
    assert "expected one of its ranks: 0, 1, 2, found coordinator_rank=3. Set coordinator_rank=0" in outcome.text


ALONE = "do not hold a tensor exactly once (/cut)"  # is said to rank 0, which saves alone
# Of each program, what is said of the places that it is refused for, and the checkpoints that there are in the end.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "save_shards": (
        [
            ALONE,
            "layers.0.bias is F32 [7] (model) on rank 0 and F32 [6] (model) on rank 1",
            "found /a; rank 0 against rank 1",
            "(/a)",
            "/b is tied to /a on rank 0 and F32 [3] (extra) on rank 1",
        ],
        ["iter_0000001", "iter_0000002"],
    ),
    "give_objects_in_any_order": ([], ["iter_0000001"]),
    "count_messages": ([], [f"iter_000000{iteration}" for iteration in (1, 2, 3, 4)]),
    "name_other_coordinators": (["coordinator"], []),
    "fail_early_on_rank_1": (
        ["coordinator_rank=5", "nested too deeply", "no UTF-8 encoding", "The path is invalid"],
        ["iter_0000002"],
    ),
    "fail_in_the_background": (["errno 5"], ["iter_0000003"]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_and_none_waits(outcomes: dict[str, Outcome], name: str) -> None:
    texts, committed = CASES[name]
    for output in outcomes[name].outputs:
        assert [text for text in texts if text not in output and text != ALONE] == [], output
    assert ALONE not in texts or ALONE in outcomes[name].text
    assert outcomes[name].committed == committed


def test_what_was_saved_by_two_is_loaded_by_one(outcomes: dict[str, Outcome]) -> None:
    file = outcomes["save_shards"].folder / "iter_0000002/extra/extra-00001-of-00001.safetensors"
    assert load_file(file)["/a"].tolist() == [0.0] * 3
    whole = state_of(*trained(0, fill=5.0))
    load_state_dict(outcomes["fail_in_the_background"].folder, whole)
    assert same(whole, state_of(*trained(0)))
