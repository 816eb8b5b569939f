"""Checkpoints of DeepSpeed: which moments are whose, and, at night, a training of DeepSpeed itself that goes on here.

Where DeepSpeed is not installed, what needs it is skipped: `make test-interop` installs and runs it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.families import hf_config
from reprise.errors import CheckpointError, MismatchError
from scripts.faults.ranks import free_port
from tests import ROOT
from tests.harness import TINY, compose, curve, run_ok
from tests.interop.dcp_producers import batches
from tests.interop.deepspeed_build import built_extensions
from tests.interop.deepspeed_layout import Way, deepspeed_classes, groups_of, of_source, write
from tests.interop.states import assert_carried, opened, overrides_of, replace_file, state_of
from tests.messages import refused
from trainer.commands import convert
from trainer.run.build import describe_alone

SOURCE = state_of("gpt2")
STATE, OURS = of_source(SOURCE), overrides_of("gpt2")
NAMES = [name for group in groups_of(STATE, Way(0, 1)) for name in group]


def test_moments_that_only_shapes_could_name_need_a_list(tmp_path: Path) -> None:
    write(tmp_path, STATE, Way(0, 1))
    with refused(MismatchError, "transformer.h.0.attn.c_proj.weight", "--optimizer-names=FILE", "--weights-only"):
        opened("deepspeed", tmp_path, OURS)
    assert_carried(opened("deepspeed", tmp_path, OURS, optimizer_names=NAMES), SOURCE)
    with refused(MismatchError, "transformer.ln_f.bias is [24]"):
        opened("deepspeed", tmp_path, OURS, optimizer_names=NAMES[::-1])
    alone = opened("deepspeed", tmp_path, OURS, weights_only=True)
    assert not alone.has_optimizer
    assert_carried(alone, SOURCE)


def test_buffers_longer_than_their_parameters_are_refused(tmp_path: Path) -> None:
    write(tmp_path, STATE, Way(3, 2))

    def lengthen(table: dict[str, Any]) -> None:
        saved = table["optimizer_state_dict"]
        saved["fp32_flat_groups"] = [torch.cat([torch.zeros(2), buffer]) for buffer in saved["fp32_flat_groups"]]
        for entry in saved["optimizer_state_dict"]["state"].values():
            entry |= {key: torch.cat([torch.zeros(2), entry[key]]) for key in ("exp_avg", "exp_avg_sq")}

    with deepspeed_classes():
        replace_file(next(tmp_path.rglob("zero_pp_rank_0*optim_states.pt")), lengthen)
    with pytest.raises(CheckpointError, match="numbers"):
        opened("deepspeed", tmp_path, OURS)


# ---- DeepSpeed itself

SAVED, END = 3, 6
# One text for all Pythons: the rounding of bfloat16 depends on the samples.
DATA = ["data=text", f"data.path={ROOT / 'LICENSE'}"]
RUN = [*TINY, *DATA, f"train.train_iters={END}", "optimizer.lr=1e-2", "schedule.min_lr=1e-3"]
MODELS = {"gpt2": ["model=gpt2_tiny"], "llama3": ["model=llama3_tiny", "model.n_kv_head=1"]}


BF16 = {"bf16": {"enabled": True}}
# Family, ZeRO's stage and settings, and others of DeepSpeed.
JOBS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "0": ("gpt2", {"stage": 0}, {}),
    "1": ("gpt2", {"stage": 1, "parameter_alignment": True}, {}),
    "2-llama3": ("llama3", {"stage": 2, "round_robin_gradients": True}, {}),
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
    command = ["import", "deepspeed", str(folder / "ds"), str(tmp_path / "run/checkpoints"), "--trust-pickle"]
    named = [f"--optimizer-names={folder / 'names.txt'}"] if name == "0" else []
    assert convert.main([*command, *named, *overrides]) == 0
    run_ok(tmp_path / "run", overrides)
    expected = json.loads((folder / "losses.json").read_text())[SAVED:]
    found = [float.fromhex(row[1]) for row in curve(tmp_path / "run")]
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    print(f"{name}: {differences}")
    # float32: sums in another order. bfloat16: norms and sums are bfloat16 there, and float32 here.
    bound = 1e-3 if "bf16" in name else 1e-5
    assert max(differences) <= bound
    assert min(abs(a - b) for a, b in itertools.pairwise(expected)) > 4 * bound
