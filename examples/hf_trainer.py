"""transformers' Trainer: python examples/hf_trainer.py FOLDER; run it again after a kill."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from reprise import AsyncSaver, load


class Samples(IterableDataset[Any]):
    """Samples by number, from any number on."""

    start = 0

    def __iter__(self) -> Any:
        for number in range(self.start, 1 << 30):
            ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number))
            yield {"input_ids": ids, "labels": ids}


class Checkpoints(TrainerCallback):
    """Saves with Reprise in place of the Trainer, and loads at the start."""

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder, self.samples = folder, samples

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        objects, optimizer = {"schedule": given["lr_scheduler"]}, given["optimizer"].optimizer
        loaded = load(self.folder, given["model"], optimizer, state=objects, missing_ok=True)
        state.global_step = loaded["iteration"]
        self.samples.start = state.global_step * args.train_batch_size
        self.saver = AsyncSaver(self.folder, max_checkpoint_keep=2)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        print(state.global_step, given["model"].transformer.wpe.weight.sum().item().hex(), flush=True)
        if state.global_step % 2 == 0:
            schedule = {"schedule": given["lr_scheduler"]}
            self.saver.save(state.global_step, given["model"], given["optimizer"].optimizer, state=schedule)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.saver.close()


def main(folder: Path, iterations: int = 12) -> None:
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    quiet: Any = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments, samples = TrainingArguments(str(folder), max_steps=iterations, **quiet), Samples()
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples, callbacks=[Checkpoints(folder, samples)]).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
