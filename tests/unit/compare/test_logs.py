"""Logs as their programs write them: each is read rightly, or refused with what to do."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.compare.test_curves import losses_of
from trainer.compare.curves import Curve, Tolerance, compare, report
from trainer.compare.logs import TextLog, parse_log, parse_times
from trainer.compare.read import read_curve
from trainer.compare.table import summarize

GREEN, RED, OFF = "\x1b[32m", "\x1b[31m", "\x1b[39m"
LOSSES = {1: 10.95, 2: 10.5, 3: 9.75}
MEANS = {10: 10.5, 20: 9.25, 30: 8.125}


def megatron(losses: dict[int, float], *, label: str = "lm loss", before: str = " [2025-05-27 15:23:07]") -> str:
    return "".join(
        f"{before} iteration {n:8d}/      30 | consumed samples: {n * 8:12d} | elapsed time per iteration (ms): 9.1 | "
        f"throughput per GPU (TFLOP/s/GPU): 40.4 | learning rate: 1.500000E-06 | global batch size:     8 | "
        f"{label}: {loss:.6E} | loss scale: 1.0 | grad norm: 5.960 | number of skipped iterations:   0 |\n"
        for n, loss in losses.items()
    )


def titan(losses: dict[int, float]) -> str:
    return "".join(
        f"[rank0]:[titan] 2025-10-30 14:32:58,897 - root - INFO - {RED}step: {n:2}  {GREEN}loss: {loss:7.4f}  "
        f"\x1b[38;2;180;60;0mgrad_norm:  3.6855  {OFF}memory:  2.47GiB(3.12%)  tps: 3,502  tflops: 1,190.25  mfu: 0.19%"
        f"{OFF}\n"
        for n, loss in losses.items()
    )


def trainer_state(losses: dict[int, float]) -> str:
    entries = [
        {"epoch": n / 30, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": loss, "step": n}
        for n, loss in losses.items()
    ]
    entries.insert(1, {"epoch": 0.3, "eval_loss": 3.0, "eval_runtime": 1.0, "step": 10})
    entries.append({"epoch": 1.0, "step": 30, "total_flos": 1.0, "train_loss": 9.29, "train_runtime": 9.0})
    return json.dumps({"best_metric": None, "epoch": 1.0, "global_step": 30, "log_history": entries}, indent=2)


def rows(head: str, form: str) -> str:
    return "\n".join([head, *(form.format(n=n, loss=loss) for n, loss in LOSSES.items()), ""])


NANOGPT = """\
tokens per iteration will be: 16,384
step 0: train loss 10.9911, val loss 10.9876
iter 0: loss 10.9500, time 31045.12ms, mfu -100.00%
iter 1: loss 10.5000, time 120.31ms, mfu -100.00%
iter 2: loss 9.7500, time 119.93ms, mfu -100.00%
"""
LLMC = "val loss 11.010\n" + "".join(
    f"step {n:4d}/3 | loss {loss:.6f} (+nanz)| norm 1.5 (+nanz)| lr 3.00e-04 | 9.1 ms\n" for n, loss in LOSSES.items()
)
RESTARTED = (
    "".join(f"step {n}/9 | train loss {loss} |\n" for n, loss in {**LOSSES, 4: 9.5, 5: 9.25}.items())
    + "[rank0]: Traceback\nresumed from iteration 1\n"
    + "".join(f"step {n}/9 | train loss {loss} |\n" for n, loss in {2: 10.5, 3: 9.875}.items())
)
# What a log has, how its losses are described, and what they are where they are not `LOSSES`.
READ: dict[str, Sequence[Any]] = {
    "Megatron-LM, a mean of ten": (megatron(MEANS), "Megatron or GPT-NeoX: mean of 10 iterations, of the whole", MEANS),
    "Megatron-LM, each iteration": (megatron(LOSSES), "Megatron or GPT-NeoX: each iteration's, of the"),
    "Megatron-DeepSpeed by torchrun": (
        megatron(MEANS, before="[default7]:").replace(" | elapsed", " | consumed tokens: 655,360 | elapsed"),
        "Megatron or GPT-NeoX: mean of 10 iterations",
        MEANS,
    ),
    "times that are none": (
        megatron(MEANS, before=" [2026-13-45 25:61:61]").replace(": 9.1", ": 9,1"), "Megatron or GPT-NeoX", MEANS,
    ),
    "GPT-NeoX": (
        megatron(MEANS, label="lm_loss", before=" samples/sec: 12.345 |"), "GPT-NeoX: mean of 10 iterations", MEANS,
    ),
    "nanoGPT": (NANOGPT, "each iteration's, of the last micro batch of rank 0, counted from 0"),
    "llm.c by CUDA": (LLMC, "step lines: each iteration's"),
    "torchtitan in colours": (titan(LOSSES), "torchtitan: each iteration's"),
    "trainer_state.json": (trainer_state(MEANS), "HF Trainer: mean of 10 iterations", MEANS),
    "Lightning": ("epoch,step,val_loss,train_loss\n0,0,,10.95\n0,0,11.0,\n0,1,,10.5\n0,2,,9.75\n", "rank 0's batch"),
    "W&B in CSV": (
        rows('"Step","run-1 - train/loss","run-1 - train/loss__MIN","run-1 - train/loss__MAX"',
             '"{n}","{loss}","0","99"'),
        "W&B: as its program logged it",
    ),
    "W&B in JSON lines": (
        rows("", '{{"_step": 1{n}, "text": "\u2028", "train/global_step": {n}, "train/loss": {loss}}}'), "W&B: as its",
    ),
    "lines with separators of thousands": (
        "step 1,000/10,000 | train loss 10.5 |\nstep 1,001/10,000 | train loss 9.5 |\n",
        "step lines",
        {1000: 10.5, 1001: 9.5},
    ),
    "UTF-16 of PowerShell": (codecs.BOM_UTF16_LE + LLMC.replace("\n", "\r\n").encode("utf-16-le"), "step lines"),
    "UTF-16 after ASCII": (
        b"step 1/3 | train loss 10.95 |\n" + LLMC.partition("/3")[2].encode("utf-16-le"), "step lines",
    ),
    "lines between progress bars": (
        " 0%|          | 0/3 [00:00<?, ?it/s]\r".join(LLMC.splitlines(keepends=True)), "step lines",
    ),
    "lines below a configuration in JSON": ('{"step": 1, "lr": 0.1}\n' + LLMC, "step lines"),
    "ranks that agree": (
        "".join(f"{rank}: step {n}/3 | train loss {x} |\n" for n, x in LOSSES.items() for rank in range(4)),
        "step lines",
    ),
}  # fmt: skip


def read(folder: Path, name: str, content: str | bytes) -> Curve:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_curve(folder / name)


@pytest.mark.parametrize("case", READ)
def test_a_log_is_read_as_its_program_means_it(tmp_path: Path, case: str) -> None:
    content, meaning, *losses = READ[case]
    curve = read(tmp_path, "a.jsonl" if "JSON lines" in case else "a.log", content)
    assert [losses_of(curve)] == (losses or [LOSSES])
    comparison = compare(curve, curve, tolerance=Tolerance(1e-5))
    for text in (report(comparison), summarize(comparison, "a")["losses"]):
        assert meaning in text


def test_a_day_that_is_none_is_no_time() -> None:
    log = TextLog(megatron(MEANS, before=" [2026-13-45 25:61:61]"), "a.log")
    assert set(parse_times(log)[1].values()) == {0.0091}


REFUSED: dict[str, tuple[str, str]] = {
    "HF Trainer's lines": ("{'loss': 10.95, 'epoch': 0.1}\n" * 2, "trainer_state.json"),
    "a progress bar": (
        "".join(f"\r 10%|#  | {n}/30 [00:01<00:09,  9.9it/s, loss={x}]" for n, x in LOSSES.items()),
        "trainer_state.json",
    ),
    "commas of two meanings": ("step 1/3 | train loss 10,995 |\n", "LC_ALL=C"),
    "ranks that differ": (
        "".join(f"[rank{r}]: step {n}/3 | train loss {x + r} |\n" for n, x in LOSSES.items() for r in range(2)),
        "one rank",
    ),
    "ranks without a name": (
        "".join(f"step {n}/3 | train loss {x + r} |\n" for n, x in LOSSES.items() for r in range(2)),
        "one rank",
    ),
    "two runs of W&B": ("Step,a - loss,b - loss\n1,2.5,3.5\n", "one run"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "fix"), REFUSED.values(), ids=REFUSED)
def test_a_log_that_cannot_be_read_says_what_to_do(tmp_path: Path, content: str, fix: str) -> None:
    with refused(DataError, "a.log") as caught:
        read(tmp_path, "a.log", content)
    assert fix in str(caught.value)


def test_the_last_launch_replaces_all_that_an_earlier_one_logged(tmp_path: Path) -> None:
    curve = read(tmp_path, "a.log", RESTARTED)
    assert losses_of(curve) == {1: 10.95, 2: 10.5, 3: 9.875}
    assert "3 lines from launches" in curve.notes[0]


def compared(base: str, test: str) -> Sequence[str]:
    curves = (parse_log(TextLog(text, name)) for text, name in ((base, "base.log"), (test, "test.log")))
    return report(compare(*curves, tolerance=Tolerance(1e-5))).splitlines()


def test_a_mean_of_ten_is_not_compared_with_one_iteration() -> None:
    single = dict.fromkeys(range(1, 31), 10.5)
    for base, test in ((megatron(MEANS), megatron(single)), (titan(single), megatron(MEANS))):
        with refused(DataError, "means of", "--log-interval 1"):
            compared(base, test)
    assert compared(megatron(MEANS), megatron(MEANS, label="lm_loss"))[-1] == "equal within 1e-05: 3/3 iterations"
    assert compared(megatron(MEANS), trainer_state(MEANS))[-1] == "equal within 1e-05: 3/3 iterations"


def test_a_lost_line_or_one_more_changes_no_interval() -> None:
    lines = compared(trainer_state(MEANS), trainer_state({1: 10.95, **MEANS}))
    assert lines[-1] == "equal within 1e-05: 3/3 iterations in both; MISSING: 1 in base (first at 1)"
    lost = {n: loss for n, loss in MEANS.items() if n != 20} | {40: 8.0, 50: 7.5}
    assert "MISSING: 1 in test (first at 20)" in compared(megatron({**MEANS, 40: 8.0, 50: 7.5}), megatron(lost))[-1]


def test_nanogpt_is_compared_at_the_iteration_of_its_loss() -> None:
    lines = compared(NANOGPT, LLMC)
    assert lines[-1] == "equal within 1e-05: 3/3 iterations"
    assert any("its step 0 is iteration 1" in line for line in lines)
