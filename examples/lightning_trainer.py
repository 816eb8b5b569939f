"""Lightning's Trainer: python examples/lightning_trainer.py FOLDER 2; again after a kill, with 1 or 2 processes."""

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from reprise import latest
from reprise.integrations.lightning import RepriseIO

MICRO_BATCHES = 2  # of an epoch, over all processes: halves and sums of two are exact in any order


class CheckpointIO(RepriseIO, lightning.plugins.CheckpointIO):
    """A CheckpointIO that saves with Reprise."""


class Model(lightning.LightningModule):
    """A small model, each of whose epochs is an iteration on numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.current_epoch)
        return DataLoader(list(torch.randn(MICRO_BATCHES, 8, 16, generator=generator)))  # type: ignore[arg-type]

    def training_step(self, x: Any, number: int) -> Any:
        return (self.layers(x) - x.sum(-1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(self.global_step, self.layers[0].weight.sum().item().hex(), flush=True)


def main(folder: Path, processes: int, iterations: int = 12) -> None:
    torch.manual_seed(0)
    settings: Any = {"accelerator": "cpu", "strategy": "ddp", "devices": processes, "logger": False}
    trainer = lightning.Trainer(
        **settings,
        accumulate_grad_batches=MICRO_BATCHES // processes,
        max_epochs=iterations,
        reload_dataloaders_every_n_epochs=1,
        plugins=[CheckpointIO(max_checkpoint_keep=2)],
        callbacks=[lightning.callbacks.ModelCheckpoint(folder, every_n_epochs=2)],
    )
    trainer.fit(Model(), ckpt_path=latest(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
