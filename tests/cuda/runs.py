"""Runs of the trainer's command on a device and on a CPU, in sizes that suit each."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from scripts.bench.machine import compile_error
from tests.cuda.devices import SIMULATED
from tests.cuda.recorded import record
from tests.harness import ALL_CORES, TINY, Ended, launch

_FEW = (
    "schedule.lr_warmup_iters=3",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "logging.tensorboard=false",
)
# GPT-2 124M, and the widths of LLaMA-3 1B with few layers, so that the disk takes little time.
_SMALL = {"gpt2": ("model=gpt2_tiny", *TINY), "llama3": ("model=llama3_tiny", *TINY[5:])}
SHAPES = {
    "cpu": _SMALL,
    SIMULATED: _SMALL,
    "cuda": {
        "gpt2": ("model=gpt2_124m", "train.seq_length=1024", *_FEW),
        "llama3": ("model=llama3_1b", "model.n_layer=2", "train.seq_length=1024", *_FEW),
    },
}
FAMILIES = tuple(_SMALL)
DETERMINISTIC = "train.deterministic=true"


def arguments(device: torch.device, family: str, *more: str, iterations: int = 8, interval: int = 4) -> list[str]:
    return [
        *SHAPES[device.type][family],
        f"train.device={device.type}",
        f"train.train_iters={iterations}",
        f"checkpoint.save_interval={interval}",
        *more,
    ]


@functools.cache
def fast(device: torch.device) -> tuple[str, ...]:
    """Return the settings of the published speed; the compiler takes too long for the gate, and may be missing."""
    if device.type != "cuda":
        return ("train.dtype=bfloat16",)
    error = compile_error(device)
    record("torch.compile", f"off in the runs: {error}" if error else "on")
    return "train.dtype=bfloat16", f"train.compile={'false' if error else 'true'}"


def most_s(device: torch.device) -> float:
    """Return the seconds of a launch."""
    return 150.0 if device.type == "cuda" else 60.0


def cores(device: torch.device) -> tuple[int, ...] | None:
    """Return the cores of a launch: a rank alone has one otherwise, and the compiler takes many."""
    return ALL_CORES if device.type == "cuda" else None


def ran(folder: Path, overrides: list[str], device: torch.device, **settings: int) -> Ended:
    """Run the trainer's command to its end."""
    ended = launch(folder, overrides, cores=cores(device), timeout_s=most_s(device), **settings)
    assert ended.ok or "kill_after" in settings, ended.text
    return ended
