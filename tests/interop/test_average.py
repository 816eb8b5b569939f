"""A mean of checkpoints has the bits of numpy's in float64, from any topology, and opens as any other checkpoint."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reprise.errors import ConfigError, MismatchError
from reprise.format import FORMAT, STATE, StoredDtype, TensorKind, TensorSpec
from reprise.loading import open_checkpoint
from reprise.ranks import StoreChannel
from reprise.saving import Checkpointer, SavePolicy
from reprise.storage import FILE_SYSTEM
from reprise.tensors import Contents, stored_dtype
from tests.fakes import Axis, Sharding, all_ranks
from tests.harness import all_files, compose, tensor_files
from tests.interop.states import begun, overrides_of, state_of
from tests.messages import refused
from trainer.commands.checkpoint import FINE, IMPOSSIBLE, main
from trainer.interop.average import factors_of, weighted_mean
from trainer.interop.output import write_checkpoint
from trainer.interop.tensor_files import blocks_of

DTYPES = {"wide": torch.float64, "weight": torch.float32, "half": torch.bfloat16, "small": torch.float16}
SHAPE = (96, 40)
SHARDINGS = {
    "one rank": Sharding("one rank"),
    "rows": Sharding("rows", (Axis("row", 2),)),
    "columns": Sharding("columns", (Axis("column", 2),)),
    "replicas of rows": Sharding("replicas of rows", (Axis("replica", 2), Axis("row", 2))),
}


def values_at(iteration: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    values = {name: torch.randn(SHAPE, generator=generator).to(dtype) for name, dtype in DTYPES.items()}
    return {**values, "count": torch.tensor(iteration)}


def save(run: Path, sharding: Sharding, iterations: list[int], *, kind: TensorKind = TensorKind.MODEL) -> None:
    """Save the weights and moments of some iterations as the ranks of a sharding."""

    def call(channel: StoreChannel) -> None:
        checkpointer = Checkpointer(
            SavePolicy(run / "checkpoints"), channel, nonce="n", local_ranks=range(sharding.world_size)
        )
        checkpointer.start()
        for iteration in iterations:
            values = values_at(iteration)
            specs = [
                TensorSpec(kind, name, tuple(v.shape), stored_dtype(v.dtype, where=name), tuple(v.shape))
                for name, v in values.items()
            ]
            moment = TensorSpec(TensorKind.OPTIMIZER, "exp_avg.weight", SHAPE, StoredDtype.F32, SHAPE)
            state = {**values, moment.name: values["weight"]}
            live = sharding.live(channel.rank, [*specs, moment], state)
            document = {"format": FORMAT, "iteration": iteration, "valid_loss": 2.5, "base": {"format": "llm.c"}}
            contents = Contents((*specs, moment), tuple(live), {}, {STATE: document, "config.json": {"dtype": "x"}})
            report = checkpointer.save(iteration, contents)
            assert report is not None
            assert report.error is None
        checkpointer.close()

    all_ranks(sharding.world_size, call)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of five checkpoints for each sharding."""
    folder = tmp_path_factory.mktemp("runs")
    for name, sharding in SHARDINGS.items():
        save(folder / name, sharding, [2, 4, 6, 8, 10])
    return {name: folder / name for name in SHARDINGS}


def numpy_mean(factors: list[float], name: str) -> npt.NDArray[np.float64]:
    """Return the mean of iterations 4 to 10 in float64, not yet rounded."""
    terms = [f * values_at(i)[name].double().numpy() for f, i in zip(factors, (4, 6, 8, 10), strict=True)]
    return sum(terms[1:], terms[0]) / math.fsum(factors)


@pytest.mark.parametrize("rule", ["ema:0.9", "1,-2,0.25,3"])
def test_a_mean_is_that_of_numpy_rounded_once(runs: dict[str, Path], tmp_path: Path, rule: str) -> None:
    command = ["merge", str(runs["one rank"]), str(tmp_path), "--from", "3", "--to", "10", "--weights", rule]
    assert main(command) == FINE
    assert main(["verify", str(tmp_path)]) == FINE
    merged, factors = load_file(tmp_path / "iter_0000010/model.safetensors"), factors_of(rule, 4)
    assert merged["wide"].numpy().tobytes() == numpy_mean(factors, "wide").tobytes()
    assert merged["weight"].numpy().tobytes() == numpy_mean(factors, "weight").astype(np.float32).tobytes()
    assert int(merged["count"]) == 10


@pytest.mark.parametrize("sharding", list(SHARDINGS)[1:])
def test_saves_of_any_topology_give_the_same_bytes(runs: dict[str, Path], tmp_path: Path, sharding: str) -> None:
    for name in ("one rank", sharding):
        command = ["merge", str(runs[name]), str(tmp_path / name), "--from", "2", "--to", "8", "--weights", "ema:0.5"]
        assert main(command) == FINE
    expected = tensor_files(tmp_path / "one rank/iter_0000008")
    assert list(expected) == ["model.safetensors"]
    assert tensor_files(tmp_path / sharding / "iter_0000008") == expected


def test_the_state_names_the_parts(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["one rank"]
    command = ["merge", str(run), str(tmp_path), "--from", "8", "--to", "10", "--weights", "1,3", "--json"]
    assert main(command) == FINE
    printed = json.loads(capsys.readouterr().out)
    assert [row["share"] for row in printed["of"]] == [0.25, 0.75]
    state = open_checkpoint(tmp_path / "iter_0000010", FILE_SYSTEM).state
    digests = [open_checkpoint(run / f"checkpoints/iter_{i:07d}", FILE_SYSTEM).digest for i in (8, 10)]
    assert state["merged"] == {
        "weights": "1,3",
        "of": [
            {"iteration": 8, "share": 0.25, "manifest_xxh3_64": digests[0]},
            {"iteration": 10, "share": 0.75, "manifest_xxh3_64": digests[1]},
        ],
    }
    assert (state["iteration"], state["valid_loss"]) == (10, None)
    assert json.loads((tmp_path / "iter_0000010/config.json").read_text()) == {"dtype": "x"}


def test_what_cannot_be_merged_is_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(runs["one rank"], tmp_path / "run"))
    out, parts = tmp_path / "out", ["--from", "2", "--to", "6"]
    before = all_files(run)

    def assert_refused(named: str, *arguments: object) -> None:
        assert main(["merge", *map(str, arguments)]) == IMPOSSIBLE
        assert named in capsys.readouterr().err

    assert_refused("two checkpoints", run, out, "--from", "5", "--to", "7")
    for rule, named in {"ema:1.5": "ema:1.5", "1,2": "expected 3", "1,-2,1": "1,-2,1"}.items():
        assert_refused(named, run, out, *parts, "--weights", rule)
    assert_refused(str(run), run, run / "checkpoints", *parts)
    assert_refused("nowhere", tmp_path / "nowhere", out, *parts)
    assert all_files(run) == before
    assert not out.exists()
    damaged = run / "checkpoints/iter_0000004/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x77")
    assert_refused("A tensor is damaged", run, out, *parts)
    save(run, Sharding("one rank"), [12], kind=TensorKind.ADAPTER)
    assert_refused("different models", run, out, "--from", "10", "--to", "12")
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_two_tensors_are_in_memory() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def read(value: float) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            assert all(reference() is None for reference in alive)
            tensor = torch.full((3,), value)
            alive.append(weakref.ref(tensor))
            return tensor

        return call

    assert weighted_mean([read(1.0), read(2.0), read(6.0)], [1.0, 1.0, 1.0]).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once_to_16_bits(dtype: torch.dtype) -> None:
    tie = 1 + torch.finfo(dtype).eps / 2  # of two steps, of which the even one is 1
    values = torch.tensor(
        [tie, tie + 2**-40, tie - 2**-40, -tie - 2**-40, 0.0, -0.0, math.inf, 1e-300], dtype=torch.float64
    )
    (block,) = blocks_of(values, dtype, where="w")
    above = 1 + torch.finfo(dtype).eps
    expected = torch.tensor([1.0, above, 1.0, -above, 0.0, -0.0, math.inf, 0.0], dtype=dtype)
    assert bytes(block) == bytes(memoryview(expected.view(torch.uint8).numpy()))


def test_the_rules_have_their_factors() -> None:
    assert factors_of("mean", 3) == [1.0, 1.0, 1.0]
    assert factors_of("ema:0.5", 4) == [0.125, 0.125, 0.25, 0.5]
    # The update before checkpoint i counts with the factors of this and all later ones: 1 - sqrt(i / 4).
    factors = factors_of("minus-sqrt", 4)
    assert [round(sum(factors[i:]), 12) for i in range(4)] == [round(1 - math.sqrt(i / 4), 12) for i in range(4)]
    for rule in ("median", "ema:", "ema:nan", "", "1,,2", "1,nan,2"):
        with pytest.raises(ConfigError):
            factors_of(rule, 3)


def test_merged_checkpoints_open_and_begin_another(tmp_path: Path) -> None:
    overrides, name = overrides_of("gpt2"), "transformer.h.1.mlp.c_fc.weight"
    states = [replace(state_of("gpt2", seed), iteration=seed) for seed in (2, 4)]
    for state in states:
        write_checkpoint(state, tmp_path / "run", compose(overrides))
    out = tmp_path / "out"
    assert main(["merge", str(tmp_path / "run"), str(out), "--from", "2", "--to", "4"]) == FINE
    model, report = AutoModelForCausalLM.from_pretrained(out / "iter_0000004", output_loading_info=True)
    assert not any(report.values())
    mean = ((states[0].read(name).double() + states[1].read(name).double()) / 2).float()
    assert torch.equal(model.state_dict()[name], mean)

    new = [*overrides, f"run.dir={tmp_path / 'new'}", f"checkpoint.load={out}"]
    with refused(MismatchError, str(out)):
        begun(*new)
    weights = dict(begun(*new, "checkpoint.finetune=true").state.parts[0].model.named_parameters())
    assert torch.equal(weights[name], mean)
