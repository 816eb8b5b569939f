"""Runs on a device: killed, moved from and to a CPU, stopped in a save, and over two ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import trainer.__main__
from tests.cuda import one_device
from tests.cuda.devices import CPU_IN_SOAK, CUDA
from tests.cuda.recorded import record
from tests.harness import ALL_CORES, TINY, Ended, around_iterations, call_on_ranks, curve, launch, run_ok, tensor_files
from trainer.build import Run

_FEW = (
    "schedule.lr_warmup_iters=3",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "logging.tensorboard=false",
)
# GPT-2 124M, and the widths of LLaMA-3 1B with few layers, so that the disk takes little time.
SHAPES = {
    "cpu": {"gpt2": ("model=gpt2_tiny", *TINY), "llama3": ("model=llama3_tiny", *TINY[5:])},
    "cuda": {
        "gpt2": ("model=gpt2_124m", "train.seq_length=1024", *_FEW),
        "llama3": ("model=llama3_1b", "model.n_layer=2", "train.seq_length=1024", *_FEW),
    },
}
FAMILIES = tuple(SHAPES["cpu"])
# What a run of the published speed has; the compiler takes too long for the gate.
FAST = {"cpu": ("train.dtype=bfloat16",), "cuda": ("train.dtype=bfloat16", "train.compile=true")}
DETERMINISTIC = "train.deterministic=true"
MOST_S = {"cpu": 60.0, "cuda": 150.0}


def arguments(device: torch.device, family: str, *more: str, iterations: int = 8, interval: int = 4) -> list[str]:
    return [
        *SHAPES[device.type][family],
        f"train.device={device.type}",
        f"train.train_iters={iterations}",
        f"checkpoint.save_interval={interval}",
        *more,
    ]


def ran(folder: Path, overrides: list[str], device: torch.device, **settings: int) -> Ended:
    """Run the trainer's command to its end."""
    # A rank alone has one core otherwise, and the compiler takes many.
    cores = ALL_CORES if device.type == "cuda" else None
    ended = launch(folder, overrides, cores=cores, timeout_s=MOST_S[device.type], **settings)
    assert ended.ok or "kill_after" in settings, ended.text
    return ended


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", [CPU_IN_SOAK, CUDA], indirect=True)
def test_a_killed_run_resumes_with_equal_bits(tmp_path: Path, device: torch.device, family: str) -> None:
    overrides = arguments(device, family, *FAST[device.type], DETERMINISTIC)
    ran(tmp_path / "unbroken", overrides, device)
    killed = ran(tmp_path / "killed", overrides, device, kill_after=6, saved=4)
    assert killed.statuses == (-9,)
    resumed = ran(tmp_path / "killed", overrides, device)
    assert "iteration 4" in resumed.text
    assert curve(tmp_path / "killed") == curve(tmp_path / "unbroken")
    last = "checkpoints/iter_0000008"
    assert tensor_files(tmp_path / "killed" / last) == tensor_files(tmp_path / "unbroken" / last)


@pytest.mark.cuda
def test_bits_without_the_flag_are_recorded(tmp_path: Path) -> None:
    """Nothing is promised without `train.deterministic=true`; what a device does goes into the record."""
    device = torch.device("cuda")
    overrides = arguments(device, "gpt2", *FAST["cuda"], "checkpoint.save=null")
    for name in ("one", "two"):
        ran(tmp_path / name, overrides, device)
    pairs = zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True)
    differing = [one[0] for one, two in pairs if one != two]
    record(
        "bits of two runs without train.deterministic",
        f"differ from iteration {differing[0]}" if differing else "equal",
    )


@pytest.mark.parametrize("device", [CPU_IN_SOAK, CUDA], indirect=True)
def test_a_checkpoint_goes_from_cpu_to_device_and_back(tmp_path: Path, device: torch.device) -> None:
    cpu = torch.device("cpu")
    common = ["model=gpt2_tiny", *TINY, "checkpoint.save_interval=4"]
    ran(tmp_path / "cpu", [*common, "train.train_iters=12", "train.device=cpu"], cpu)
    folder = tmp_path / "moved"
    for kind, iterations in (("cpu", 4), (device.type, 8), ("cpu", 12)):
        ran(
            folder,
            [*common, f"train.train_iters={iterations}", f"train.device={kind}", "schedule.lr_decay_iters=12"],
            device,
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


@pytest.mark.parametrize("device", [CPU_IN_SOAK, CUDA], indirect=True)
def test_sigterm_in_a_save_keeps_it_and_the_next(tmp_path: Path, device: torch.device) -> None:
    overrides = arguments(device, "gpt2", DETERMINISTIC)
    ran(tmp_path / "unbroken", overrides, device)
    folder = tmp_path / "stopped"
    ended = call_on_ranks(
        _train_and_stop,
        [f"run.dir={folder}", *overrides],
        folder=tmp_path / "ranks",
        ranks=1,
        timeout_s=MOST_S[device.type],
    )
    assert ended.ok, ended.text
    assert sorted(path.name for path in (folder / "checkpoints").glob("iter_*")) == ["iter_0000004", "iter_0000005"]
    ran(folder, overrides, device)
    assert curve(folder) == curve(tmp_path / "unbroken")
    last = "checkpoints/iter_0000008"
    assert tensor_files(folder / last) == tensor_files(tmp_path / "unbroken" / last)


LAYOUTS = {
    "zero3": "parallel.zero_stage=3",
    "tp2": "parallel.tensor_model_parallel_size=2",
    "pp2": "parallel.pipeline_model_parallel_size=2",
}
_DEAR = [pytest.param(*CPU_IN_SOAK.values, layout, marks=CPU_IN_SOAK.marks) for layout in LAYOUTS]
_ON_CUDA = [pytest.param(*CUDA.values, layout, marks=CUDA.marks) for layout in LAYOUTS]
PLACES = [*_DEAR, *_ON_CUDA]


@pytest.mark.parametrize(("device", "layout"), PLACES, indirect=["device"])
def test_two_ranks_on_one_device_train_the_same_curve(tmp_path: Path, device: torch.device, layout: str) -> None:
    """Over gloo, since nccl refuses two ranks on one device; see the next test."""
    common = ["model=gpt2_tiny", *TINY, "train.train_iters=4", f"train.device={device.type}"]
    ran(tmp_path / "one", common, device)
    ended = call_on_ranks(
        one_device.train,
        [f"run.dir={tmp_path / 'two'}", *common, LAYOUTS[layout]],
        folder=tmp_path / "ranks",
        ranks=2,
        timeout_s=MOST_S[device.type],
    )
    assert ended.ok, ended.text
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    losses = [[float.fromhex(row[1]) for row in rows] for rows in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5 if device.type == "cpu" else 1e-4)
    # The checkpoint of two ranks opens on one, which writes the same bytes.
    source = tmp_path / "two/checkpoints/iter_0000004"
    run_ok(tmp_path / "again", [*common, f"checkpoint.load={source}", "checkpoint.reshard=true"])
    assert tensor_files(tmp_path / "again/checkpoints/iter_0000004") == tensor_files(source)


@pytest.mark.cuda
def test_nccl_refuses_two_ranks_on_one_device(tmp_path: Path) -> None:
    """The reason why the test above takes gloo; a release of nccl that does not refuse is recorded."""
    ended = call_on_ranks(
        one_device.train_over_nccl,
        [f"run.dir={tmp_path / 'run'}", "model=gpt2_tiny", *TINY, "train.train_iters=2", "train.device=cuda"],
        folder=tmp_path / "ranks",
        ranks=2,
        timeout_s=120.0,
    )
    record("two ranks on one device over nccl", "trained" if ended.ok else _reason(ended.text))
    assert ended.ok or "Duplicate GPU" in ended.text, ended.text


def _reason(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if "Duplicate GPU" in line), "another error")
