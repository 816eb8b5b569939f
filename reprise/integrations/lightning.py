"""Lightning's Trainer with Reprise checkpoints, under every strategy with a `CheckpointIO`."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from reprise.api import load_state_dict
from reprise.async_saver import AsyncSaver

# The step in `ModelCheckpoint` file names.
_STEP = re.compile(r"step=(\d+)")


class RepriseIO:
    """A mixin for Lightning's `CheckpointIO`, which saves in the background.

        class CheckpointIO(RepriseIO, pytorch_lightning.plugins.CheckpointIO): ...

        trainer = Trainer(plugins=[CheckpointIO(max_checkpoint_keep=3)], callbacks=[ModelCheckpoint("checkpoints")])
        trainer.fit(model, data, ckpt_path=reprise.latest("checkpoints"))

    `ModelCheckpoint` decides when to save. A checkpoint is `iter_<global_step>` beside the file that Lightning names,
    with that file's content. The same line starts and resumes a run, on any number of ranks.

    Args:
        max_checkpoint_keep: How many of a folder's newest checkpoints to keep. 0 keeps all. It replaces `save_top_k`,
            because Lightning removes a file while the next one is written.
    """

    def __init__(self, max_checkpoint_keep: int = 0) -> None:
        self._keep = max_checkpoint_keep
        self._savers: dict[str, AsyncSaver] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save in the background. Lightning calls this on rank 0 alone.

        Raises:
            TrainerError: The previous save failed, or a value cannot be saved.
        """
        folder = os.path.dirname(path)
        if folder not in self._savers:
            is_distributed = dist.is_available() and dist.is_initialized()
            group = dist.new_group([0], use_local_synchronization=True) if is_distributed else None
            self._savers[folder] = AsyncSaver(folder, max_checkpoint_keep=self._keep, process_group=group)
        # One value: its optimizers have numbered parameters.
        value = SimpleNamespace(state_dict=lambda: checkpoint, load_state_dict=checkpoint.update)
        self._savers[folder].save_state_dict(checkpoint["global_step"], {"lightning": value})

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint with its tensors on the CPU, on all ranks.

        Args:
            path: A path as for `reprise.load`, or a `ModelCheckpoint` file name with `step=` in it.

        Raises:
            TrainerError: The checkpoint is damaged or missing, or a save failed.
        """
        for saver in self._savers.values():
            saver.wait()
        step = _STEP.search(os.path.basename(path))
        folder = os.path.dirname(path) if step else os.fspath(path)
        checkpoint: dict[str, Any] = {}
        value = SimpleNamespace(state_dict=dict, load_state_dict=checkpoint.update)
        load_state_dict(folder, {"lightning": value}, iteration=int(step[1]) if step else None)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Leave removal to `max_checkpoint_keep`, because the next checkpoint may be under way."""

    def teardown(self) -> None:
        """Wait for running saves, and release their folders.

        Raises:
            TrainerError: A save failed.
        """
        while self._savers:
            self._savers.popitem()[1].close()
