"""`reprise compare-steps` names where two runs part: faults, each put into one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import models.gpt2
import trainer.__main__
import trainer.training.loop
from reprise.storage import FILE_SYSTEM
from tests.harness import TINY, call_on_ranks
from tests.positions import methods_with
from trainer.config.compose import CommandLine, over_saved, resolve
from trainer.data.data_file import Ints
from trainer.launch.environment import Environment
from trainer.launch.start_times import StartTimes
from trainer.steps import search
from trainer.steps.replay import RecordedRun, replay
from trainer.train_command import run

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.global_batch_size=8",
    "model.dropout=0.1",
    "train.train_iters=6",
    "train.threads=1",
    "checkpoint.save_interval=2",
)
Patch = pytest.MonkeyPatch
Train = Callable[[Path, Sequence[str]], None]


def flip(patch: Patch, tensor: str) -> None:
    """Flip a bit of one weight, or of its second moment, after iteration 4, before it is saved."""
    iterate = trainer.training.loop.iterate

    def acting(run: Any) -> Any:
        result = iterate(run)
        if run.state.progress.iteration == 4:
            (part,) = run.state.parts
            weight = part.model.transformer["h"]["1"].mlp.c_fc.weight
            value = part.optimizer.state[weight][tensor] if tensor else weight.data
            value.view(torch.int32)[3, 7] ^= 1 << 22 if tensor else 1
        return result

    patch.setattr(trainer.training.loop, "iterate", acting)


def change_mask(patch: Patch) -> None:
    """Draw the masks of a micro batch of iteration 5 from another key."""
    dropout_key = trainer.training.loop.dropout_key

    def other(seed: int, iteration: int, *, micro_batch: int) -> int:
        return dropout_key(seed + (iteration == 5 and micro_batch == 2), iteration, micro_batch=micro_batch)

    patch.setattr(trainer.training.loop, "dropout_key", other)


def change_kernel(patch: Patch) -> None:
    """Compute attention by products in place of the fused kernel."""

    def attention(q: Any, k: Any, v: Any, mask: Any, dropout_p: float) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        return (torch.dropout(scores.softmax(-1), dropout_p, train=True) @ v).transpose(1, 2).flatten(2)

    patch.setattr(models.gpt2, "causal_attention", attention)


def change_sample(patch: Patch) -> None:
    """Change a token of one sample of iteration 3."""

    def changed(windows: Ints, positions: Ints) -> Ints:
        windows[positions == 2 * 8 + 5, 4] ^= 1
        return windows

    for (owner, name), method in methods_with(changed).items():
        patch.setattr(owner, name, method)


def round_output(patch: Patch) -> None:
    """Round the output of one MLP to bfloat16."""
    forward = models.gpt2.GPT2MLP.forward

    def rounded(mlp: Any, x: torch.Tensor, key: int | None) -> torch.Tensor:
        output = forward(mlp, x, key)
        return output.bfloat16().float() if mlp.dropout.layer == 0 else output

    patch.setattr(models.gpt2.GPT2MLP, "forward", rounded)


@pytest.fixture
def train(monkeypatch: Patch) -> Iterator[Train]:
    """Return a function that runs the trainer's command in this process."""
    threads = torch.get_num_threads()

    def call(folder: Path, overrides: Sequence[str]) -> None:
        command = CommandLine((f"run.dir={folder}", *overrides))
        run(resolve(over_saved(command, FILE_SYSTEM)), Environment.read({}), StartTimes())

    yield call
    torch.set_num_threads(threads)


# A fault of the program of B, which stays when B is trained again, or keys; and the place of the first difference.
FAULTS: dict[str, tuple[Callable[[Patch], None] | str, tuple[int, str, str, str]]] = {
    "kernel": (change_kernel, (1, "forward", "transformer.h.0.attn.c_proj", "output")),
    "mask": (change_mask, (5, "forward", "dropout", "output")),
    "learning rate": ("optimizer.lr=0.0011", (1, "optimizer", "transformer.wte.weight", "weight")),
    "sample": (change_sample, (3, "forward", "the model", "input")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "kernel" else pytest.mark.slow) for name in FAULTS]
)
def test_the_first_tensor_of_a_fault_is_named(tmp_path: Path, monkeypatch: Patch, train: Train, name: str) -> None:
    fault, place = FAULTS[name]
    train(tmp_path / "a", BASE)
    with monkeypatch.context() as patch:
        if callable(fault):
            fault(patch)
        train(tmp_path / "b", [*BASE, *([fault] if isinstance(fault, str) else [])])

    def again(run: RecordedRun, first: int, last: int, begin: int, out: Path, values: Sequence[str]) -> None:
        with monkeypatch.context() as patch:
            if callable(fault) and run.folder.name == "b":
                fault(patch)
            replay(run.folder, first, last, out, begin=begin, values=values)

    monkeypatch.setattr(search, "launch_replay", again)
    report = search.compare_steps(tmp_path / "a", tmp_path / "b", folder=tmp_path / "records")
    assert report.difference is not None
    actual = report.difference.place
    assert (actual.iteration, actual.phase, actual.name, actual.what) == place, report
    assert report.difference.largest
    assert report.unrepeated == ((), ())


def _again(run: RecordedRun, first: int, last: int, begin: int, out: Path, values: Sequence[str]) -> None:
    replay(run.folder, first, last, out, begin=begin, values=values)


@pytest.mark.parametrize("tensor", [pytest.param("", marks=pytest.mark.slow), "exp_avg_sq"])
def test_a_flipped_bit_is_named(tmp_path: Path, monkeypatch: Patch, train: Train, tensor: str) -> None:
    train(tmp_path / "a", BASE)
    with monkeypatch.context() as patch:
        flip(patch, tensor)
        train(tmp_path / "b", BASE)
    monkeypatch.setattr(search, "launch_replay", _again)
    report = search.compare_steps(tmp_path / "a", tmp_path / "b")
    assert report.difference is None  # of what is computed again from the newest equal checkpoints
    assert report.first == (2, 2)
    assert report.unrepeated[0] == ()
    assert report.unrepeated[1][0] in (5, 6)
    name = f"{tensor}.transformer.h.1.mlp.c_fc.weight".lstrip(".")
    assert report.saved.startswith(f"iteration 4, {name}: 1 of "), report.saved


def train_rounded(arguments: list[str]) -> None:
    """Run the trainer's command, or train a run again, with an MLP that is rounded."""
    round_output(Patch())
    record(arguments)


def record(arguments: list[str]) -> None:
    """Run the trainer's command, or train a run again."""
    if len(arguments) > len(BASE):
        sys.argv = ["trainer", *arguments]
        trainer.__main__.main()
    else:
        folder, first, last, begin, out, *values = arguments
        replay(Path(folder), int(first), int(last), Path(out), begin=int(begin), values=values)


@pytest.mark.slow
@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize(
    "layout", [["parallel=zero3"], ["parallel=tp2", "parallel.zero_stage=3"]], ids=["zero3", "tp2"]
)
def test_logical_tensors_are_compared_across_topologies(
    tmp_path: Path, monkeypatch: Patch, layout: list[str], is_faulty: bool
) -> None:
    invariance = ["parallel.invariant_ranks=4", "parallel.invariant_tensor_ranks=2", "model.pad_vocab_multiple=2"]
    faulty = train_rounded if is_faulty else record
    for name, function, count, overrides in (("a", record, 1, []), ("b", faulty, 2 * len(layout), layout)):
        words = [f"run.dir={tmp_path / name}", *BASE, *invariance, *overrides]
        ended = call_on_ranks(function, words, folder=tmp_path / name, ranks=count)
        assert ended.ok, ended.text

    def again(run: RecordedRun, first: int, last: int, begin: int, out: Path, values: Sequence[str]) -> None:
        words = [str(run.folder), str(first), str(last), str(begin), str(out), *values]
        function = faulty if run.folder.name == "b" else record
        ended = call_on_ranks(function, words, folder=out, ranks=run.ranks)
        assert ended.ok, ended.text

    monkeypatch.setattr(search, "launch_replay", again)
    report = search.compare_steps(tmp_path / "a", tmp_path / "b", iteration=2, folder=tmp_path / "records")
    assert report.unrepeated == ((), ())
    if not is_faulty:
        assert (report.iteration, report.difference, report.alone) == (None, None, (0, 0))
        return
    assert report.difference is not None
    place = report.difference.place
    assert (place.iteration, place.phase, place.name, place.what) == (1, "forward", "transformer.h.0.mlp", "output")
    assert report.difference.largest
