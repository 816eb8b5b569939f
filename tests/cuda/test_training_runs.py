"""Runs on a device: moved from and to a CPU, stopped in a save, and traced."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import trainer.__main__
from tests.cuda.devices import ALL_SLOW
from tests.cuda.runs import DETERMINISTIC, arguments, cores, most_s, ran
from tests.harness import TINY, around_iterations, call_on_ranks, curve, tensor_files
from trainer.run.build import Run


@pytest.mark.parametrize("device", ALL_SLOW, indirect=True)
def test_a_checkpoint_goes_from_cpu_to_device_and_back(tmp_path: Path, device: torch.device) -> None:
    cpu = torch.device("cpu")
    common = ["model=gpt2_tiny", *TINY, "checkpoint.save_interval=4"]
    ran(tmp_path / "cpu", [*common, "train.train_iters=12", "train.device=cpu"], cpu)
    folder = tmp_path / "moved"
    for kind, iterations in (("cpu", 4), (device.type, 8), ("cpu", 12)):
        ran(
            folder,
            [*common, f"train.train_iters={iterations}", f"train.device={kind}", "schedule.lr_decay_iters=12"],
            torch.device(kind),  # with as many cores as the unbroken run, whose bits the first part has
        )
    moved, unbroken = curve(folder), curve(tmp_path / "cpu")
    assert [(row[0], row[3], row[4]) for row in moved] == [(row[0], row[3], row[4]) for row in unbroken]
    losses = [[float.fromhex(row[1]) for row in rows] for rows in (moved, unbroken)]
    # float32 sums in another order, carried on by twelve steps.
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert moved[:4] == unbroken[:4]


def _train_and_stop(overrides: list[str]) -> None:
    """Send SIGTERM to this process while the save of iteration 4 is under way, or at least not yet recorded."""

    def stop(run: Run, iteration: int) -> None:
        if iteration == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    around_iterations(before=stop)
    sys.argv = ["trainer", *overrides]
    trainer.__main__.main()


@pytest.mark.parametrize("device", ALL_SLOW, indirect=True)
def test_sigterm_in_a_save_keeps_it_and_the_next(tmp_path: Path, device: torch.device) -> None:
    overrides = arguments(device, "gpt2", DETERMINISTIC)
    ran(tmp_path / "unbroken", overrides, device)
    folder = tmp_path / "stopped"
    ended = call_on_ranks(
        _train_and_stop,
        [f"run.dir={folder}", *overrides],
        folder=tmp_path / "ranks",
        ranks=1,
        cores=cores(device),
        timeout_s=most_s(device),
    )
    assert ended.ok, ended.text
    assert sorted(path.name for path in (folder / "checkpoints").glob("iter_*")) == ["iter_0000004", "iter_0000005"]
    ran(folder, overrides, device)
    assert curve(folder) == curve(tmp_path / "unbroken")
    last = "checkpoints/iter_0000008"
    assert tensor_files(folder / last) == tensor_files(tmp_path / "unbroken" / last)


@pytest.mark.parametrize("device", ALL_SLOW, indirect=True)
def test_a_trace_has_the_kernels_of_the_device(tmp_path: Path, device: torch.device) -> None:
    overrides = ["model=gpt2_tiny", *TINY, "train.train_iters=4", "checkpoint.save=null", "train.profile_steps=[2,3]"]
    ran(tmp_path / "run", [*overrides, f"train.device={device.type}"], device)
    (path,) = (tmp_path / "run/profile").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {"cpu_op", *(["kernel"] if device.type == "cuda" else [])} <= {event.get("cat") for event in events}
