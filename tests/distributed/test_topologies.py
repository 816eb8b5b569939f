"""Every topology trains the same curve, resumes its own bits, and reads and writes the same checkpoint.

A launch visits a topology: it loads the checkpoint that the topology before it saved, saves it again, trains on, and
resumes in between. The resume computes activations again and evaluates nothing, which changes no bit.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

import trainer.__main__
from scripts.faults.ranks import free_port
from tests.harness import TINY, call_on_ranks, checkpoint, curve, launch, run_ok, tensor_files
from tests.profiles import nightly, slow

_TP, _SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
_PP, _VPP = "parallel.pipeline_model_parallel_size=2", "parallel.num_virtual_stages_per_pipeline_rank=2"
_COPIES = "parallel.replicate=2"


def _zero(stage: int) -> str:
    return f"parallel.zero_stage={stage}"


# Four ranks share six micro batches: some have two of them, others one.
TOPOLOGIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2 zero0": (2, (_zero(0),)),
    "dp2 zero1": (2, (_zero(1),)),
    "dp2 zero2": (2, (_zero(2),)),
    "dp3 zero3": (3, (_zero(3),)),
    "dp4 zero1": (4, (_zero(1),)),
    "dp4 zero3 in 2 copies": (4, (_zero(3), _COPIES)),
    "tp2": (2, (_TP,)),
    "tp2+sp": (2, (_TP, _SP)),
    "pp2": (2, (_PP,)),
    "pp2 vpp2": (2, (_PP, _VPP)),
    "tp2 dp2 zero1": (4, (_TP, _zero(1))),
    "tp2 dp2 zero3": (4, (_TP, _zero(3))),
    "pp2 dp2": (4, (_PP,)),
    "tp2+sp pp2": (4, (_TP, _SP, _PP)),
    "tp2+sp pp2 dp2": (8, (_TP, _SP, _PP)),
    "tp2 dp4 zero3 in 2 copies": (8, (_TP, _zero(3), _COPIES)),
    # Shares are equal in a pipeline. Masks of dropout depend on the size of micro batches: without GPT-2.
    "pp2 dp4 zero2 in 2 copies": (8, (_PP, _zero(2), _COPIES, "train.micro_batch_size=1")),
}
WITH_TENSORS = [name for name in TOPOLOGIES if "tp2" in name]
WITHOUT = [name for name in TOPOLOGIES if "tp2" not in name]

GPT2, LLAMA3 = "model=gpt2_tiny", "model=llama3_tiny"
MUON = ("model=qwen3_tiny", "model.n_kv_head=2", "model.head_dim=14", "optimizer=muon")
# A stage without gradients, and a last one with some.
FROZEN = (GPT2, "train.freeze=['transformer.w?e.weight','transformer.h.[01].*','transformer.h.3.ln_1.*']")
# Masks of dropout are those of one rank, but for tensor parallel ones. GPT-2 is tied, LLaMA-3 is not.
FAMILIES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "gpt2": ((GPT2, "model.dropout=0.1"), WITHOUT[:-1]),
    "gpt2 untied": ((GPT2, "model.tie_word_embeddings=false"), [*WITH_TENSORS, "pp2 vpp2"]),
    "gpt2 in many files": ((GPT2, "checkpoint.file_bytes=8192"), ["dp2 zero2", "dp3 zero3", "tp2"]),
    "gpt2 padded": ((GPT2, "model.pad_vocab_multiple=64"), ["dp3 zero3", "tp2"]),
    "gpt2 frozen": (FROZEN, ["dp2 zero0", "dp2 zero2", "dp3 zero3", "tp2+sp", "pp2 vpp2", "tp2 dp2 zero3"]),
    "llama3": ((LLAMA3, "model.n_kv_head=2"), list(TOPOLOGIES)),
    "llama3 tied": ((LLAMA3, "model.tie_word_embeddings=true"), ["dp2 zero1", "tp2+sp pp2", "pp2 vpp2"]),
    "qwen3 and muon": (MUON, ["dp3 zero3", "tp2", "tp2 dp2 zero3", "pp2", "dp4 zero3 in 2 copies"]),
}
GATE = {
    "gpt2": ("dp3 zero3", "pp2 vpp2"),
    "gpt2 untied": ("tp2+sp",),
    "gpt2 in many files": ("dp2 zero2",),
    "qwen3 and muon": ("tp2",),
}
# `make test-all` visits every topology with LLaMA-3, and these of the others; the night visits all.
ALL = {
    "gpt2": ("dp2 zero1", "dp4 zero3 in 2 copies", "pp2 dp2"),
    "gpt2 untied": ("tp2 dp2 zero3", "tp2+sp pp2"),
    "gpt2 in many files": ("tp2",),
    "gpt2 padded": ("dp3 zero3", "tp2"),
    "gpt2 frozen": ("dp2 zero2", "pp2 vpp2", "tp2 dp2 zero3"),
    "llama3": tuple(name for name, (ranks, _) in TOPOLOGIES.items() if ranks < 8),
    "llama3 tied": ("pp2 vpp2",),
    "qwen3 and muon": ("dp4 zero3 in 2 copies", "tp2 dp2 zero3"),
}


def case(family: str, name: str) -> object:
    """Return a family and a topology, with the mark of the run that visits it."""
    if name in GATE.get(family, ()):
        return pytest.param(family, name)
    return slow(family, name) if name in ALL[family] else nightly(family, name)


CASES = [case(family, name) for family, (_, names) in FAMILIES.items() for name in names]
START, SAVED = 2, 4
RECOMPUTE = "train.activation_checkpointing=true"


def overrides_of(family: str) -> list[str]:
    """Return the overrides of a run, of odd sizes: 257 rows, 5 layers, widths that 3 does not divide."""
    schedule = ["schedule.lr_decay_iters=40", "schedule.lr_warmup_iters=1"]
    return [*TINY, "model.n_layer=5", *schedule, "checkpoint.reshard=true", *FAMILIES[family][0]]


class Visits:
    """The topologies visited of each family, each from the checkpoint of the one before."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._source: dict[str, Path] = {}

    @cache  # noqa: B019 - as long as the module's tests
    def origin(self, family: str, end: int) -> Path:
        """Return a run of one rank, saved at START."""
        run = self._root / family / f"origin_{end}"
        run_ok(run, [*overrides_of(family), f"train.train_iters={end}", f"checkpoint.save_interval={START}"])
        return run

    def visit(self, family: str, name: str, end: int) -> tuple[Path, Path]:
        """Return the run of a topology from START to its end, and that which resumed it at SAVED."""
        origin, (ranks, axes) = self.origin(family, end), TOPOLOGIES[name]
        run, again = (self._root / family / f"{name}{suffix}".replace(" ", "_") for suffix in ("", " again"))
        source = self._source.get(family, checkpoint(origin, START))
        words = [*overrides_of(family), *axes]
        go_on = [*words, f"train.train_iters={end}", f"checkpoint.save_interval={SAVED}"]
        commands = [
            [f"run.dir={run}", *words, f"train.train_iters={START}", f"checkpoint.load={source}"],
            [f"run.dir={run}", *go_on, "train.eval_interval=2", "train.eval_iters=1"],
            [f"run.dir={again}", *go_on, RECOMPUTE, f"checkpoint.load={checkpoint(run, SAVED)}"],
        ]
        turns = [(free_port(), command) for command in commands]
        ended = call_on_ranks(_run_in_turn, [json.dumps(turns)], folder=run, ranks=ranks, timeout_s=240.0)
        assert ended.ok, f"{name}\n{ended.text[-4000:]}"
        self._source[family] = checkpoint(run, START)
        return run, again


def _run_in_turn(arguments: list[str]) -> None:
    """Run several commands of the trainer in one rank, each meeting its peers on a port of its own."""
    for port, command in json.loads(arguments[0]):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = ["trainer", *command]
        trainer.__main__.main()


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Visits:
    return Visits(tmp_path_factory.mktemp("topologies"))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_topology_has_the_bytes_and_the_curve_of_one_rank(visits: Visits, family: str, name: str) -> None:
    end = 22 if TOPOLOGIES[name][0] == 8 else 6
    origin = visits.origin(family, end)
    run, again = visits.visit(family, name, end)
    # The same state, the same bytes.
    assert tensor_files(checkpoint(run, START)) == tensor_files(checkpoint(origin, START))
    # A resume at the same topology is bitwise.
    assert curve(again) == [row for row in curve(run) if row[0] > SAVED]
    assert tensor_files(checkpoint(again, end)) == tensor_files(checkpoint(run, end))
    # And the curve goes on.
    rows, expected = ([row for row in curve(folder) if row[0] > START] for folder in (run, origin))
    assert [(row[0], row[3], row[4]) for row in rows] == [(row[0], row[3], row[4]) for row in expected]
    losses, others = ([float.fromhex(row[1]) for row in table] for table in (rows, expected))
    # float32 rounding of one forward pass; later iterations add what the optimizer makes of it.
    assert losses[0] == pytest.approx(others[0], rel=1e-6)
    assert losses == pytest.approx(others, abs=1e-5)
    norms, others = ([float.fromhex(row[2]) for row in table] for table in (rows, expected))
    assert norms == pytest.approx(others, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [("gpt2 in many files", "gpt2"), ("gpt2", "gpt2 padded"), ("gpt2 padded", "gpt2")]
)
def test_files_and_padding_are_left_behind(visits: Visits, tmp_path: Path, source: str, target: str) -> None:
    origin = visits.origin(source, 6)
    load = ["model.dropout=0.0", f"train.train_iters={START}", f"checkpoint.load={checkpoint(origin, START)}"]
    run_ok(tmp_path / "run", [*overrides_of(target), *load, "checkpoint.override_dropout=true", _zero(2)], ranks=2)
    tensors, expected = {}, {}
    for values, folder in ((tensors, tmp_path / "run"), (expected, origin)):
        for path in checkpoint(folder, START).rglob("*.safetensors"):
            values |= {name: value.numpy().tobytes() for name, value in load_file(path).items()}
    assert tensors == expected
    assert len(tensor_files(checkpoint(tmp_path / "run", START))) == 2
    assert len(tensors["transformer.wte.weight"]) == 257 * 20 * 4  # without padding


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_blocks_train_the_curve(visits: Visits, tmp_path: Path) -> None:
    run = [*overrides_of("gpt2 untied"), "train.train_iters=6", "train.compile=true"]
    ended = launch(tmp_path / "compiled", run, timeout_s=240.0)
    assert ended.ok, ended.text
    losses, expected = (
        [float.fromhex(row[1]) for row in curve(folder)]
        for folder in (tmp_path / "compiled", visits.origin("gpt2 untied", 6))
    )
    assert losses == pytest.approx(expected, abs=1e-4)  # other kernels, other rounding
