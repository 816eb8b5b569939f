"""transformers' Trainer: torchrun --nproc-per-node 2 examples/hf_trainer.py FOLDER; again after a kill, on 1 or 2."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

from reprise.integrations.hf_trainer import SavesWithReprise

MICRO_BATCHES = 2  # of an iteration, over all processes: halves and sums of two are exact in any order


class Samples(Dataset[Any]):
    """Samples by number."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class Trainer(SavesWithReprise, transformers.Trainer):
    """A Trainer that saves with Reprise."""


class Printer(transformers.TrainerCallback):
    """Prints a figure of every iteration."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weight = given["model"].transformer.wpe.weight.sum().item()
        print(state.global_step, weight.hex(), random.random().hex(), flush=True)


def main(folder: Path, iterations: int = 12) -> None:
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    accumulation = MICRO_BATCHES // int(os.environ.get("WORLD_SIZE", "1"))
    settings: Any = {"save_steps": 2, "save_total_limit": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=iterations,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        **settings,
    )
    model = transformers.GPT2LMHeadModel(config)
    Trainer(model, arguments, train_dataset=Samples(), callbacks=[Printer()]).train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
