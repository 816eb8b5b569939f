"""Texts of the model while it trains: the same on every topology, and nothing of the training changes."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

import trainer.__main__
import trainer.generate.during_training
from reprise.errors import TrainerError
from tests.bpe import train_bpe
from tests.harness import TINY, call_on_ranks, compose, curve, launch, run_ok, tensor_files
from tests.messages import refused
from tests.profiles import nightly
from trainer.config.checks import validate
from trainer.generate.sampling import Sampling, choose

GPT2 = ["model=gpt2_tiny", "model.dropout=0.1", "model.pad_vocab_multiple=4"]
LLAMA3 = ["model=llama3_tiny", "model.n_kv_head=2"]
BASE = [*TINY, "model.n_layer=4", "train.train_iters=4"]
SAMPLES = ["train.sample_interval=2", "train.sample_prompt='def f(x):'", "train.sample_tokens=10"]

_TP, _SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
TOPOLOGIES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "zero 3": (2, ["parallel.zero_stage=3"]),
    "tp sp": (2, [_TP, _SP]),
    "zero 2": (3, ["parallel.zero_stage=2"]),
    "tp zero 3": (4, [_TP, "parallel.zero_stage=3"]),
    "tp sp dp": (4, [_TP, _SP]),
}
GATE = ("zero 3", "tp sp")


def samples(text: str) -> list[tuple[str, str]]:
    """Return the iterations and texts of the samples in a log."""
    return re.findall(r"^step +(\d+)/\d+ \| sample (.*)$", text, flags=re.M)


def compare(folder: Path, overrides: list[str], ranks: int) -> list[tuple[str, str]]:
    """Hold a run with samples against one without, and return the samples."""
    ended = launch(folder / "plain", [*BASE, *overrides], ranks=ranks, timeout_s=240.0)
    assert ended.ok, ended.text
    ended = launch(folder / "sampled", [*BASE, *overrides, *SAMPLES], ranks=ranks, timeout_s=240.0)
    assert ended.ok, ended.text
    shown = samples(ended.text)
    assert [row[0] for row in curve(folder / "plain")] == [1, 2, 3, 4]
    assert curve(folder / "sampled") == curve(folder / "plain")
    last = "checkpoints/iter_0000004"
    assert tensor_files(folder / "sampled" / last) == tensor_files(folder / "plain" / last)
    assert [iteration for iteration, _ in shown] == ["2", "4"]
    assert all(text.startswith(("'def f(x):", '"def f(x):')) for _, text in shown)
    return shown


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Return the samples of LLaMA-3 on one rank. It has no dropout, whose masks depend on the topology."""
    return samples(run_ok(tmp_path_factory.mktemp("one") / "run", [*BASE, *LLAMA3, *SAMPLES]).text)


def marks(name: str) -> object:
    return () if name in GATE else pytest.mark.nightly if TOPOLOGIES[name][0] > 3 else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in TOPOLOGIES])
def test_samples_are_those_of_one_rank_and_change_no_bit(
    tmp_path: Path, on_one_rank: list[tuple[str, str]], name: str
) -> None:
    ranks, overrides = TOPOLOGIES[name]
    assert compare(tmp_path, [*LLAMA3, *overrides], ranks) == on_one_rank


def test_a_pipeline_samples_nothing(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [*BASE, *LLAMA3, *SAMPLES, "parallel=pp2"], ranks=2)
    assert ended.ok, ended.text
    assert samples(ended.text) == []
    assert ended.text.count("a pipeline samples no texts") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["train.dtype=bfloat16"], 1),
        (["train.activation_checkpointing=true", "parallel=zero3"], 2),
        nightly(["parallel=tp2_sp"], 2),
        nightly(["train.compile=true"], 1),
    ],
)
def test_samples_change_no_bit_of_a_run_with_dropout(tmp_path: Path, options: list[str], ranks: int) -> None:
    compare(tmp_path, [*GPT2, *options], ranks)


def test_a_killed_and_resumed_run_shows_every_sample_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ["logging.tensorboard=true", "train.train_iters=8", "checkpoint.save_interval=3"]
    overrides = [*GPT2, *TINY, *SAMPLES, *keys]
    assert launch(run, overrides, kill_after=5, saved=3).statuses == (-9,)
    text = run_ok(run, overrides).text
    assert [iteration for iteration, _ in samples(text)] == ["4", "6", "8"]
    events = EventAccumulator(str(run / "tensorboard"), tensor_size_guidance={"text": 0}).Reload()
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("sample"))
    found = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)}
    assert [event.step for event in events.Tensors(tag)] == [2, 4, 6, 8]
    for iteration, shown in samples(text):
        assert repr(found[int(iteration)].removeprefix("    ").replace("\n    ", "\n")) == shown


def _signal_while_sampling(arguments: list[str]) -> None:
    """Let rank 1 signal itself at its third token, then run the trainer's command."""
    calls = 0

    def signalling(logits: torch.Tensor, sampling: Sampling, *, number: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return choose(logits, sampling, number=number)

    trainer.generate.during_training.choose = signalling
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


def test_a_signal_breaks_a_sample_off_on_all_ranks(tmp_path: Path) -> None:
    endless = [
        "train.sample_interval=2",
        "train.sample_tokens=1000000",
        "model.eos_token_id=0",
        "model.vocab_size=4096",
    ]
    arguments = [f"run.dir={tmp_path}/run", *BASE, *LLAMA3, *endless, "train.train_iters=100"]
    ended = call_on_ranks(_signal_while_sampling, arguments, folder=tmp_path / "run", ranks=2)
    assert ended.ok, ended.text
    assert samples(ended.text) == []
    assert "stopping after iteration 3" in ended.text
    assert (tmp_path / "run/checkpoints/iter_0000003/manifest.json").exists()


@pytest.mark.slow
def test_the_tokenizer_of_the_data_makes_the_samples(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(train_bpe(["if it is so, so be it: x = 1\n" * 50], 270))
    (tmp_path / "a.txt").write_text("if it is so, so be it: x = 1\n" * 500)
    data = ["data=text", f"data.path={tmp_path}/a.txt", f"data.tokenizer={tokenizer}", "model.vocab_size=270"]
    ended = run_ok(tmp_path / "run", [*GPT2, *BASE, *data, *SAMPLES, "train.sample_prompt='if it'"], ranks=1)
    assert [text[1:6] for _, text in samples(ended.text)] == ["if it"] * 2


def test_token_files_of_unknown_origin_are_refused_up_front() -> None:
    with refused(TrainerError, "train.sample_interval=2", "data.tokenizer"):
        validate(compose([*GPT2, *BASE, "data=token_file", "data.train=a.bin", *SAMPLES]), 1)
