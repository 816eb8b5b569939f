"""Megatron-Core itself on the other side: a run goes on here with its losses, and there with ours.

It is the release that is installed and, beside it in a folder, the newest one, which pip installs for Python 3.12 and
later alone. `make test-interop` installs both; what needs one that is not there is skipped.

megatron-core has no CPU backend, so a copy of the package is patched: it names CUDA where it means the device of the
tensors. The rest is its own: models, optimizers, pipeline schedule and `dist_checkpointing`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness import compose, curve, run_ok, tensor_files
from tests.interop.dcp_producers import TRAINING, batches
from trainer.commands import convert
from trainer.interop.megatron.export import arguments_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NEXT, LATER = 1e-6, 1e-5
SAVED, TOTAL = 3, 8
SIZES = ["model.n_layer=4", "model.n_head=4", "model.n_embd=64", "model.intermediate_size=96", "model.vocab_size=264"]
RUN = [*TRAINING, f"train.train_iters={TOTAL}", *SIZES, "model.bos_token_id=263", "model.eos_token_id=263"]
LLAMA = ["model=llama3_tiny", "model.n_kv_head=2"]
MODELS = {
    "gpt2": ["model=gpt2_tiny", *RUN],
    "llama": [*LLAMA, *RUN, "model.tie_word_embeddings=false"],
    "llama-tied": [*LLAMA, *RUN, "model.tie_word_embeddings=true"],
}
FULLY = "fully_reshardable"
DISTRIBUTED, PLAIN = (FULLY, "dp_reshardable", "torch"), ("plain", "torch")
# Family, ranks of tensor, pipeline and data parallelism, and the forms in which the run is saved.
JOBS: Mapping[str, tuple[str, int, int, int, tuple[str, ...]]] = {
    "gpt2 1": ("gpt2", 1, 1, 1, DISTRIBUTED),
    "gpt2 1 plain": ("gpt2", 1, 1, 1, PLAIN),
    "gpt2 tp2": ("gpt2", 2, 1, 1, DISTRIBUTED),
    "llama pp2": ("llama", 1, 2, 1, DISTRIBUTED),
    "llama dp2": ("llama", 1, 1, 2, DISTRIBUTED),
    "llama tp2 pp2": ("llama", 2, 2, 1, DISTRIBUTED),
    "llama-tied tp2 pp2 plain": ("llama-tied", 2, 2, 1, PLAIN),
}
# The same layers as sub-blocks of a `HybridModel`, which the newest release alone has.
PATTERNS = {"gpt2 hybrid": "*-*-*-*-", "llama hybrid pp2": "*-*-|*-*-"}
HYBRID_JOBS = {
    "gpt2 hybrid": ("gpt2", 1, 1, 1, DISTRIBUTED),
    "llama hybrid pp2": ("llama", 1, 2, 1, DISTRIBUTED),
}
# Initial weights with which the loss falls steadily: where it jumps, differences of rounding grow a thousandfold.
SEEDS = {"gpt2 hybrid": 1}
ALL_JOBS = {**JOBS, **HYBRID_JOBS}
NEWEST = Path(sys.prefix) / "build" / "megatron-core"
CASES = [(job, form) for job, (*_, forms) in ALL_JOBS.items() for form in forms]
_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("megatron_run.py")


def windows_of(overrides: list[str]) -> Tensor:
    """Return our global batches, int64 [iterations, samples, seq_length + 1]."""
    return torch.stack(batches(compose(overrides), TOTAL))


def hybrid_arguments(pattern: str | None) -> dict[str, Any]:
    return {} if pattern is None else {"hybrid_layer_pattern": pattern, "num_layers": len(pattern.replace("|", ""))}


def write_job(
    folder: Path, overrides: list[str], windows: Tensor, *, pattern: str | None = None, seed: int = 1234, **others: Any
) -> None:
    folder.mkdir(parents=True)
    config = compose(overrides)
    adam = config.optimizer
    job = {
        "args": {**arguments_of(config.model), **hybrid_arguments(pattern)},
        "lr": adam.lr,
        "weight_decay": adam.weight_decay,
        "betas": [adam.adam_beta1, adam.adam_beta2],
        "eps": adam.adam_eps,
        "seed": seed,
        "saved": SAVED,
        "load": None,
        **others,
    }
    (folder / "job.json").write_text(json.dumps(job))
    np.save(folder / "windows.npy", windows.numpy())


def installed() -> Path:
    """Return the folder of the installed package; one that is not there if there is none."""
    found = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    return Path(found.origin if found is not None and found.origin is not None else "nowhere/core").parent


@pytest.fixture(scope="module", params=["installed", "newest"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a release of megatron-core that runs on a CPU."""
    package = installed() if request.param == "installed" else NEWEST / "megatron/core"
    if not package.is_dir():
        pytest.skip(f"megatron-core ({request.param}) is not there: `make test-interop` installs it")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(package, folder / "megatron/core")
    for path in (folder / "megatron").rglob("*.py"):
        if "fsdp" in path.parts:
            continue
        text = path.read_text()
        new = text.replace("torch.cuda.current_device()", "torch.device('cpu')").replace(".cuda()", ".cpu()")
        new = re.sub(r"device=(['\"])cuda\1", "device='cpu'", new)
        new = re.sub(r"torch\.cuda\.(Float|Half|BFloat16)Tensor", r"torch.\1Tensor", new)
        if new != text:
            path.write_text(new)
    return folder


def megatron(site: Path, ranks: int, *folders: Path) -> None:
    """Run Megatron-Core on ranks of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(_PROGRAM),
    ]
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, *map(str, folders)],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def has_hybrid(site: Path) -> bool:
    return (site / "megatron/core/models/hybrid").is_dir()


def saved_by(jobs: Path, job: str) -> Path:
    """Return the folder of a job, of a release that has its model."""
    if not (jobs / job).is_dir():
        pytest.skip("this release has no HybridModel")
    return jobs / job


@pytest.fixture(scope="module")
def jobs(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every job, trained and saved by Megatron-Core."""
    folder = tmp_path_factory.mktemp("jobs")
    by_ranks = dict[int, list[Path]]()
    for name, (family, tp, pp, dp, forms) in (ALL_JOBS if has_hybrid(site) else JOBS).items():
        by_ranks.setdefault(tp * pp * dp, []).append(folder / name)
        shape = {"tp": tp, "pp": pp, "dp": dp, "shardings": forms, "distributed": forms != PLAIN}
        chosen = {"pattern": PATTERNS.get(name), "seed": SEEDS.get(name, 1234)}
        write_job(folder / name, MODELS[family], windows_of(MODELS[family]), **chosen, **shape)
    for ranks, folders in by_ranks.items():
        megatron(site, ranks, *folders)
    return folder


@pytest.mark.parametrize(("job", "form"), CASES)
def test_an_import_goes_on_with_megatrons_losses(jobs: Path, tmp_path: Path, job: str, form: str) -> None:
    overrides = MODELS[ALL_JOBS[job][0]]
    arguments = ["import", "megatron", str(saved_by(jobs, job) / form), str(tmp_path / "checkpoints"), "--trust-pickle"]
    samples = ["--consumed-samples", str(SAVED * compose(overrides).train.global_batch_size)]
    assert convert.main([*arguments, *samples, *overrides]) == 0
    run_ok(tmp_path, overrides)
    found = [float.fromhex(row[1]) for row in curve(tmp_path)]
    assert_same(found, json.loads((jobs / job / "losses.json").read_text())[SAVED:])


def assert_same(found: list[float], expected: list[float]) -> None:
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    print("differences", differences)
    assert len(differences) == TOTAL - SAVED
    assert differences[0] <= NEXT
    assert max(differences) <= LATER


@pytest.mark.parametrize(("family", "pattern"), [*((family, None) for family in MODELS), ("llama", "*-*-*-*-")])
def test_megatron_loads_an_export_and_goes_on(site: Path, tmp_path: Path, family: str, pattern: str | None) -> None:
    if pattern and not has_hybrid(site):
        pytest.skip("this release has no HybridModel")
    overrides, windows = MODELS[family], windows_of(MODELS[family])
    run_ok(tmp_path / "run", [*overrides, f"checkpoint.save_interval={SAVED}"])
    saved = tmp_path / f"run/checkpoints/iter_{SAVED:07d}"
    assert convert.main(["export", "megatron", str(saved), str(tmp_path / "out")]) == 0
    job = {
        "load": str(tmp_path / f"out/iter_{SAVED:07d}"),
        "shardings": (FULLY,),
        "distributed": True,
        "dp": 1,
        "pp": 1,
    }
    for tp in (1, 2):
        write_job(tmp_path / f"tp{tp}", overrides, windows[SAVED:], pattern=pattern, tp=tp, **job)
        megatron(site, tp, tmp_path / f"tp{tp}")
        back = ["import", "megatron", str(tmp_path / f"tp{tp}" / FULLY), str(tmp_path / f"back{tp}"), "--trust-pickle"]
        assert convert.main([*back, *overrides]) == 0
        assert tensor_files(tmp_path / f"back{tp}/iter_{SAVED:07d}") == tensor_files(saved)
        found = [float.fromhex(row[1]) for row in curve(tmp_path / "run")][SAVED:]
        assert_same(json.loads((tmp_path / f"tp{tp}/losses.json").read_text()), found)
