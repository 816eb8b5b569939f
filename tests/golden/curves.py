"""Measures the golden curves: `python -m tests.golden.curves` writes `curves.json` anew, `... FILE` another file.

`curves.json` holds the bits of short runs: loss and gradient norm of every iteration, validation losses, and the
digests of the final tensor files. It is written anew only by a change that is meant to change the bits of a run, or for
another version of torch.

The arithmetic is the same on every x86 processor as far as its libraries allow that. A process of its own measures, so
that the libraries see these variables when they start; one thread per rank and no oneDNN are set in each rank. Digests
of elementary operations are kept beside the curves: where they differ, the machine computes other bits than the one
that measured, and the curves say nothing about the trainer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import trainer.__main__
from tests.harness import call_on_ranks, curve, tensor_files

CURVES = Path(__file__).with_name("curves.json")
ITERATIONS = 8
# On a processor with AVX-512 and AMX, the first two each change bits of these runs. The others remove what else depends
# on the processor: oneDNN's choice of instructions, and the variants with FMA of the C library's functions.
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable,-FMA4_Usable",
    "OMP_NUM_THREADS": "1",
}
_MEASURING = "REPRISE_MEASURES_CURVES"

_SMALL = (
    "model.n_layer=2",
    "model.n_head=4",
    "model.n_embd=32",
    "model.intermediate_size=64",
    "model.max_position_embeddings=16",
    "train.seq_length=16",
    "train.global_batch_size=12",  # 6 micro batches on one rank, 3 on each of two: a mean over them rounds
    "train.micro_batch_size=2",
    "train.eval_interval=4",
    "train.eval_iters=2",
    "train.clip_grad=0.5",
    f"train.train_iters={ITERATIONS}",
    "train.device=cpu",
    "schedule=linear",
    "schedule.lr_warmup_iters=2",
    "optimizer.lr=0.01",
    "checkpoint.save_interval=0",
    "logging.tensorboard=false",
)
_FAMILIES = {"gpt2": ("model=gpt2_tiny",), "llama3": ("model=llama3_tiny",)}
_TOPOLOGIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 rank": (1, ("parallel.zero_stage=0",)),
    "2 ranks, zero 0": (2, ("parallel.zero_stage=0",)),
    "2 ranks, zero 1": (2, ("parallel.zero_stage=1",)),
    "2 ranks, zero 3": (2, ("parallel.zero_stage=3",)),
    "2 ranks, pp 2": (2, ("parallel=pp2",)),
}
_BFLOAT16, _DROPOUT = "train.dtype=bfloat16", "model.dropout=0.1"
# Ranks and overrides of each run. GPT-2 ties its embeddings, LLaMA-3 does not.
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    f"{family}, {topology}": (ranks, (*model, *axes))
    for family, model in _FAMILIES.items()
    for topology, (ranks, axes) in _TOPOLOGIES.items()
} | {
    f"gpt2, {topology}, {name}": (_TOPOLOGIES[topology][0], (*_FAMILIES["gpt2"], *_TOPOLOGIES[topology][1], override))
    for name, override, topology in (
        ("dropout", _DROPOUT, "1 rank"),
        ("bfloat16", _BFLOAT16, "1 rank"),
        ("bfloat16", _BFLOAT16, "2 ranks, zero 3"),
    )
}


def measure(target: Path) -> None:
    """Write the curves to `target`, in a process that has the variables from its start."""
    command = [sys.executable, "-m", "tests.golden.curves", str(target)]
    environment = {**os.environ, **VARIABLES, _MEASURING: "1"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True, timeout=300)


def _measure(target: Path) -> None:
    _narrow(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text.txt").write_text(_text())
        runs = {name: _run(folder, name, ranks, overrides) for name, (ranks, overrides) in RUNS.items()}
    document = {"torch": str(torch.__version__), "operations": operations(), "runs": runs}
    target.write_text(json.dumps(document, indent=1) + "\n")


def _run(folder: Path, name: str, ranks: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    run = folder / name.replace(", ", "-").replace(" ", "")
    data = ("data=text", f"data.path={folder}/text.txt", f"data.cache={folder}/cache", "data.valid_fraction=0.25")
    arguments = [f"run.dir={run}", *overrides, *_SMALL, *data]
    ended = call_on_ranks(_train, arguments, folder=run, ranks=ranks)
    if not ended.ok:
        raise RuntimeError(f"{name}: {ended.text}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files = tensor_files(run / f"checkpoints/iter_{ITERATIONS:07d}")
    return {
        "loss": [row[1] for row in curve(run)],
        "grad_norm": [row[2] for row in curve(run)],
        "valid_loss": [row["valid_loss_hex"] for row in rows if row.get("event") == "evaluation"],
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }


def _train(arguments: list[str]) -> None:
    _narrow(int(os.environ.get("WORLD_SIZE", "1")))
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


def _narrow(ranks: int) -> None:
    """Use one thread and no oneDNN: its products in bfloat16 depend on the processor."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:ranks])
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)


def _text() -> str:
    """Return letters and spaces that depend on nothing but this function."""
    state, letters = 1, []
    for _ in range(16384):
        state = (state * 1103515245 + 12345) % (1 << 31)
        letters.append("etaoin shrdlu"[(state >> 16) % 13])
    return "".join(letters)


def operations() -> dict[str, str]:
    """Return digests of the results of elementary operations on the kinds of numbers that the runs have."""
    x = torch.arange(-4096, 4096, dtype=torch.float64).mul(1 / 512).reshape(64, 128)  # exact in every step

    def exact(dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    random = torch.Generator().manual_seed(5)
    q = x.float().reshape(2, 4, 64, 16)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "product": lambda: exact(torch.float32) @ exact(torch.float32).T,
        "product in bfloat16": lambda: exact(torch.bfloat16) @ exact(torch.bfloat16).T,
        "normal": lambda: torch.empty(4096).normal_(generator=random),
        "bernoulli": lambda: torch.empty(4096).bernoulli_(0.9, generator=random),
        "tanh": lambda: F.gelu(exact(torch.float32), approximate="tanh"),
        "exp": lambda: F.silu(exact(torch.float32)),
        "softmax": lambda: exact(torch.float32).log_softmax(-1),
        "norm": lambda: F.layer_norm(exact(torch.float32), (128,)),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "attention in bfloat16": lambda: F.scaled_dot_product_attention(*[q.bfloat16()] * 3, is_causal=True),
        "cos": lambda: exact(torch.float32).cos(),
        "pow": lambda: torch.tensor([beta**step for beta in (0.9, 0.95) for step in range(50)], dtype=torch.float64),
    }
    return {name: _digest(compute()) for name, compute in found.items()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else CURVES
    if os.environ.get(_MEASURING):
        _measure(target)
    else:
        measure(target)
