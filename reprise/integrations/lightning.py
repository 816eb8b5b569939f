"""Lightning's Trainer with checkpoints of Reprise, under every strategy that takes a `CheckpointIO`."""

from __future__ import annotations

import os
import re
from typing import Any

import torch.distributed as dist

from reprise.api import load_state_dict
from reprise.async_saver import AsyncSaver

# Where `ModelCheckpoint` has the step in the names that it gives.
_STEP = re.compile(r"step=(\d+)")


class RepriseIO:
    """A mixin for Lightning's `CheckpointIO`, with which a Trainer saves in the background.

        class CheckpointIO(RepriseIO, pytorch_lightning.plugins.CheckpointIO): ...

        trainer = Trainer(plugins=[CheckpointIO(max_checkpoint_keep=3)], callbacks=[ModelCheckpoint("checkpoints")])
        trainer.fit(model, data, ckpt_path=reprise.latest("checkpoints"))

    `ModelCheckpoint` says when. A checkpoint is `iter_<global_step>` beside the file that Lightning names, and holds
    what that file would. The start and every restart are the same line, on any number of ranks.

    Args:
        max_checkpoint_keep: number of newest checkpoints kept in a folder; 0 keeps all. It takes the place of
            `save_top_k`, as Lightning removes a file while the next one is written.
    """

    def __init__(self, max_checkpoint_keep: int = 0) -> None:
        self._keep = max_checkpoint_keep
        self._savers: dict[str, AsyncSaver] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save on rank 0, which alone has this call, in the background.

        Raises:
            TrainerError: if the save before did not become a checkpoint, or a value cannot be saved.
        """
        folder = os.path.dirname(path)
        if folder not in self._savers:
            is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            group = dist.new_group([0], use_local_synchronization=True) if is_one_of_many else None
            self._savers[folder] = AsyncSaver(folder, max_checkpoint_keep=self._keep, process_group=group)
        self._savers[folder].save_state_dict(checkpoint["global_step"], {"lightning": _Value(checkpoint)})

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint with its tensors on the CPU, on all ranks.

        Args:
            path: as for `reprise.load`, or a name that `ModelCheckpoint` gave, with `step=` in it.

        Raises:
            TrainerError: if the checkpoint is damaged or missing, or a save did not become one.
        """
        for saver in self._savers.values():
            saver.wait()
        value, step = _Value({}), _STEP.search(os.path.basename(path))
        folder = os.path.dirname(path) if step else os.fspath(path)
        load_state_dict(folder, {"lightning": value}, iteration=int(step[1]) if step else None)
        return value.value

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Leave the removal to `max_checkpoint_keep`, since the next checkpoint may be under way."""

    def teardown(self) -> None:
        """Wait for the saves under way, and release their folders.

        Raises:
            TrainerError: if a save did not become a checkpoint.
        """
        while self._savers:
            self._savers.popitem()[1].close()


class _Value:
    """A checkpoint as one value, whose optimizers have numbered parameters."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.value = value
