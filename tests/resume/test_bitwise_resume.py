"""A run that is killed and resumed is the unbroken run, bit for bit: curve, evaluations and final files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import ALL_CORES, TINY, checkpoint, launch, run_ok, tensor_files
from tests.profiles import nightly, slow
from tests.resume.differential import rows_of

# Killed between two saves, so that two iterations are trained twice; evaluations lie before and after them.
SAVED, KILLED, END = 4, 6, 8
BASE = [
    *TINY,
    "train.global_batch_size=8",
    f"train.train_iters={END}",
    "train.eval_interval=2",
    "train.eval_iters=1",
    f"checkpoint.save_interval={SAVED}",
]
GPT2, LLAMA3, QWEN3 = (
    ["model=gpt2_tiny", "model.dropout=0.1"],
    ["model=llama3_tiny"],
    ["model=qwen3_tiny", "model.n_kv_head=2"],
)
BFLOAT16, ZERO3 = "train.dtype=bfloat16", "parallel.zero_stage=3"
AVERAGES = ["train.ema_decay=0.9", "train.micro_batch_size=1"]
LORA = [*GPT2, "model.lora.rank=4", "model.lora.dropout=0.1"]
GROWS = ["train.batch_schedule=0:4 16:8", "train.micro_batch_size=1"]

# Each family, each dtype and each way to spread the state meets every other one in some case.
CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, GPT2),
    "llama3 bfloat16 zero0": (2, [*LLAMA3, BFLOAT16, "parallel.zero_stage=0"]),
    "gpt2 bfloat16 zero1": (2, [*GPT2, BFLOAT16]),
    "llama3 zero2": (2, [*LLAMA3, "parallel.zero_stage=2"]),
    "gpt2 zero3": (2, [*GPT2, ZERO3]),
    "llama3 bfloat16 zero3": (2, [*LLAMA3, BFLOAT16, ZERO3]),
    "averages zero3": (2, [*GPT2, *AVERAGES, ZERO3]),
    "averages pp2": (2, [*GPT2, *AVERAGES, "parallel=pp2"]),
    "averages tp2": (2, [*GPT2, *AVERAGES, "parallel=tp2"]),
    "adapters zero3": (2, [*LORA, ZERO3]),
    "adapters tp2": (2, [*LORA, "parallel=tp2"]),
    "a growing batch": (1, [*GPT2, *GROWS]),
    "a growing batch pp2": (2, [*GPT2, *GROWS, "parallel=pp2"]),
    "two copies": (4, [*GPT2, ZERO3, "parallel.replicate=2"]),
    "qwen3 and muon": (2, [*QWEN3, ZERO3, "optimizer=muon"]),
    "compiled": (1, [*GPT2, "train.compile=true"]),
    "several threads": (1, GPT2),
}
GATE = ("one rank", "llama3 bfloat16 zero3", "averages zero3", "adapters zero3", "a growing batch")
NIGHTLY = ("averages pp2", "averages tp2", "a growing batch pp2", "compiled")


@pytest.mark.parametrize("name", [n if n in GATE else nightly(n) if n in NIGHTLY else slow(n) for n in CASES])
def test_killed_and_resumed_equals_unbroken(reference: Path, tmp_path: Path, name: str) -> None:
    ranks, overrides = CASES[name]
    run = [*BASE, *overrides]
    if "adapters" in name:
        run += [f"checkpoint.load={checkpoint(reference, 4)}", "checkpoint.finetune=true"]
    cores = ALL_CORES if name == "several threads" else None
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_ok(whole, run, ranks=ranks, cores=cores)
    if name == "compiled":  # a kill would come minutes later
        shutil.copytree(whole, again)
        resumed = run_ok(again, [*run, f"checkpoint.ckpt_step={SAVED}"])
    else:
        killed = launch(again, run, ranks=ranks, kill_after=KILLED, saved=SAVED, cores=cores)
        assert set(killed.statuses) == {-9}, killed.text
        resumed = run_ok(again, run, ranks=ranks, cores=cores)
    assert f"iteration {SAVED} from" in resumed.outputs[0]
    rows = rows_of(whole)
    assert [row["iteration"] for row in rows if "loss" in row] == list(range(1, END + 1))
    assert rows_of(again) == rows
    assert tensor_files(checkpoint(again, END)) == tensor_files(checkpoint(whole, END))
