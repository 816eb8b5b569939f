"""Universal checkpoints of DeepSpeed, and, at night, a training of DeepSpeed itself that goes on here.

Where DeepSpeed is not installed, what needs it is skipped: `make test-interop` installs and runs it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.families import hf_config
from reprise.errors import MismatchError, TrainerError
from scripts.faults.ranks import free_port
from tests import ROOT
from tests.harness import TINY, compose, curve, run_ok
from tests.interop.dcp_producers import batches
from tests.interop.deepspeed_build import built_extensions
from tests.interop.states import assert_carried, opened, overrides_of, read_all, state_of, write_universal
from tests.messages import refused
from trainer.commands import convert
from trainer.run.build import describe_alone

SOURCE = state_of("gpt2")
OURS = overrides_of("gpt2")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_without_moments_is_frozen(tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int) -> None:
    frozen = "transformer.h.1.mlp.c_fc.weight"
    write_universal(tmp_path, SOURCE, stage=stage, prefix="module.", frozen=[frozen])
    zeros = torch.zeros_like(SOURCE.read(frozen))
    keys = (f"exp_avg.{frozen}", f"exp_avg_sq.{frozen}")
    others = dict.fromkeys(keys, zeros) | {f"step.{frozen}": torch.tensor(0.0)}
    source = opened("deepspeed", tmp_path, OURS)
    assert_carried(source, replace(SOURCE, read=lambda n: others.get(n, SOURCE.read(n))))
    assert source.consumed_samples == 12 * SOURCE.iteration
    assert frozen in caplog.text


def test_files_of_ranks_are_refused_with_the_program_to_run(tmp_path: Path) -> None:
    tag = tmp_path / "global_step3"
    tag.mkdir()
    (tmp_path / "latest").write_text(tag.name)
    (tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with refused(MismatchError, "ds_to_universal", str(tag)):
        opened("deepspeed", tmp_path, OURS)


def move(path: Path) -> None:
    path.rename(path.with_name("module.another.weight"))


def grow(path: Path) -> None:
    torch.save({"param": torch.zeros(96, 24)}, path / "exp_avg.pt")


def dealt_out(path: Path) -> None:
    torch.save({"param": torch.zeros(24, 96)}, path / "fp32.pt")


NAME = "transformer.h.1.mlp.c_fc.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another name": (move, "another.weight"),
    "another shape": (grow, "[24, 96]"),
    "one moment": (lambda path: (path / "exp_avg_sq.pt").unlink(), NAME),
    "numbers of another parameter": (dealt_out, "round_robin_gradients"),
    "a step below 0": (lambda path: torch.save(-1, path / "step.pt"), "-1"),
    "no step": (lambda path: (path / "step.pt").unlink(), "step.pt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_named(tmp_path: Path, case: str) -> None:
    change, named = REFUSED[case]
    write_universal(tmp_path, SOURCE)
    change(tmp_path / "global_step3_universal/zero" / NAME)
    with refused(TrainerError, named):
        read_all(opened("deepspeed", tmp_path, OURS))


# ---- DeepSpeed itself

SAVED, END = 3, 6
# One text for all Pythons: the rounding of bfloat16 depends on the samples.
DATA = ["data=text", f"data.path={ROOT / 'LICENSE'}"]
RUN = [*TINY, *DATA, f"train.train_iters={END}", "optimizer.lr=1e-2", "schedule.min_lr=1e-3"]
MODELS = {"gpt2": ["model=gpt2_tiny"], "llama3": ["model=llama3_tiny", "model.n_kv_head=1"]}


BF16 = {"bf16": {"enabled": True}}
# Family, ZeRO's stage and settings, and others of DeepSpeed.
JOBS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "1": ("gpt2", {"stage": 1, "parameter_alignment": True}, {}),
    "2-llama3": ("llama3", {"stage": 2}, {}),
    "2-dealt-out": ("llama3", {"stage": 2, "round_robin_gradients": True}, {}),
    "2-bf16": ("gpt2", {"stage": 2}, BF16),
    "3": ("gpt2", {"stage": 3, "sub_group_size": 3000}, {}),
    "3-bf16-llama3": ("llama3", {"stage": 3}, BF16),
}
RANKS = 3  # divides neither the sizes nor, with DeepSpeed's padding, their sums


def overrides_for(name: str) -> list[str]:
    family, _, others = JOBS[name]
    return [*RUN, *MODELS[family], *(["train.dtype=bfloat16"] if others else [])]


def prepare_job(folder: Path, name: str) -> None:
    """Write what DeepSpeed is to do: a run of ours, with its samples and learning rates."""
    _, zero, others = JOBS[name]
    config = compose(overrides_for(name))
    schedule, _ = describe_alone(config)
    settings = {
        "train_micro_batch_size_per_gpu": config.train.global_batch_size // RANKS,
        "gradient_clipping": config.train.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **others,
    }
    rates = [schedule.at(iteration + 1, 0) for iteration in range(END)]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(config.model)))
    (folder / "job.json").write_text(json.dumps({"config": settings, "save_at": SAVED, "lr": rates}))
    np.save(folder / "windows.npy", torch.stack(batches(config, END)).numpy())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What DeepSpeed made of every job, all in one launch."""
    root, port = tmp_path_factory.mktemp("theirs"), str(free_port())
    folders = {name: root / name for name in JOBS}
    for name, folder in folders.items():
        prepare_job(folder, name)
    command = [sys.executable, str(Path(__file__).with_name("deepspeed_run.py")), *map(str, folders.values())]
    processes = []
    with built_extensions() as built:  # compiling takes as long as it takes: the deadline is that of training
        for rank in range(RANKS):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            environment = {**os.environ, **built, **{name: str(value) for name, value in places.items()}}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HF_HUB_OFFLINE": "1"}
            with (root / f"rank{rank}.log").open("wb") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        try:
            statuses = [process.wait(timeout=600) for process in processes]
            assert statuses == [0] * RANKS, (root / "rank0.log").read_text()[-4000:]
        finally:
            for process in processes:
                process.kill()
    return folders


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", JOBS)
def test_the_loss_after_an_import_is_deepspeeds_own(theirs: dict[str, Path], tmp_path: Path, name: str) -> None:
    overrides, folder = overrides_for(name), theirs[name]
    tag = folder / f"ds/global_step{SAVED}"
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    program += ["--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
    subprocess.run(program, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True, timeout=300)
    command = ["import", "deepspeed", str(folder / "ds"), str(tmp_path / "run/checkpoints"), "--trust-pickle"]
    if name == "2-dealt-out":  # the program of DeepSpeed 0.19.8 mixes the parameters up
        assert convert.main([*command, *overrides]) == 2
        return
    assert convert.main([*command, *overrides]) == 0
    run_ok(tmp_path / "run", overrides)
    expected = json.loads((folder / "losses.json").read_text())[SAVED:]
    found = [float.fromhex(row[1]) for row in curve(tmp_path / "run")]
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    print(f"{name}: {differences}")
    # float32: sums in another order. bfloat16: norms and sums are bfloat16 there, and float32 here.
    bound = 1e-3 if "bf16" in name else 1e-5
    assert max(differences) <= bound
    assert min(abs(a - b) for a, b in itertools.pairwise(expected)) > 4 * bound
