"""What DeepSpeed itself does: trains transformers' models on given windows, saves half way, and notes every loss.

A command of its own, on each rank: `python deepspeed_run.py FOLDER...`, where every folder has `job.json`,
`config.json` and `windows.npy` [iterations, samples, tokens] and gets `ds/` and `losses.json`. It needs DeepSpeed, and
nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm
from transformers import AutoConfig, AutoModelForCausalLM


def train(folder: Path) -> None:
    """Do one job and write what came of it."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    windows = torch.from_numpy(np.load(folder / "windows.npy"))
    rank, ranks = comm.get_rank(), comm.get_world_size()
    torch.manual_seed(1)
    is_cut = job["config"]["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=job["config"]) if is_cut else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    named = [(len(getattr(p, "ds_shape", p.shape)), p) for p in model.parameters()]
    groups = [
        {"params": [p for dimensions, p in named if dimensions > 1], "weight_decay": 0.1},
        {"params": [p for dimensions, p in named if dimensions < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job["config"])
    losses = []
    for iteration, batch in enumerate(windows):
        if iteration == job["save_at"]:
            engine.save_checkpoint(str(folder / "ds"))
        for group in engine.optimizer.param_groups:
            group["lr"] = job["lr"][iteration]
        mine = batch[rank * len(batch) // ranks : (rank + 1) * len(batch) // ranks]
        logits = engine(mine[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean)
        losses.append(float(mean) / ranks)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for argument in sys.argv[1:]:
        train(Path(argument))
        comm.barrier()
    comm.destroy_process_group()
