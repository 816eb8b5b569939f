"""accelerate's `save_state` and `load_state` with checkpoints of Reprise, on any number of processes."""

from __future__ import annotations

import os
import re
from typing import Any

from reprise.api import load
from reprise.async_saver import AsyncSaver
from reprise.errors import ConfigError

_ITERATION = re.compile(r"(?:step|iter|epoch|checkpoint)[_-](\d+)")


class RepriseStates:
    """A mixin for `accelerate.Accelerator`, whose `save_state` saves in the background.

        class Accelerator(RepriseStates, accelerate.Accelerator):
            max_checkpoint_keep = 2

        start = accelerator.load_state("run")
        for step in range(start + 1, 1001):
            ...
            accelerator.save_state(f"run/step_{step}")
        accelerator.end_training()

    A checkpoint is `run/iter_<step>`: models, optimizers, schedulers, scaler, stateful loaders, registered objects and
    random state. The start and every restart are the same line, on any number of ranks. accelerate's hooks come after
    FSDP's files are written, and see neither optimizers nor random state, so this takes their place.
    """

    max_checkpoint_keep = 0  # number of newest checkpoints kept; 0 keeps all

    _folder: str | None = None
    _saver: AsyncSaver | None = None

    def save_state(self: Any, output_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> str:
        """Save in the background, and return the path to be. A call of all ranks.

        Args:
            output_dir: `FOLDER/step_N`, or `iter_`, `epoch_` or `checkpoint-` in its place; N is the iteration.

        Raises:
            ConfigError: for another name, or if a hook would write files of its own.
            TrainerError: if the save before did not become a checkpoint, or a value cannot be saved.
        """
        folder, iteration = _place(output_dir)
        if iteration is None or self._save_model_state_pre_hook:
            raise ConfigError(
                "save_state takes a name with the iteration, and no hook",
                expected="a name such as step_40",
                found=str(output_dir) if iteration is None else "a hook of register_save_state_pre_hook",
                fix="Give objects of your own to register_for_checkpointing.",
            )
        if folder != self._folder:
            self._close_saver()
            self._folder, self._saver = folder, AsyncSaver(folder, max_checkpoint_keep=self.max_checkpoint_keep)
        self._saver.save(iteration, **self._parts(), rng=True)
        return os.path.join(folder, f"iter_{iteration:07d}")

    def load_state(self: Any, input_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> int:
        """Load the newest checkpoint of a folder, and return its iteration: 0 where there is none yet.

        Args:
            input_dir: the folder, or a name that `save_state` takes, for that iteration.

        Raises:
            TrainerError: as for `reprise.load`.
        """
        if self._saver is not None:
            self._saver.wait()
        folder, iteration = _place(input_dir)
        parts = self._parts()
        loaded = load(folder, **parts, rng="if_same_ranks", iteration=iteration, missing_ok=iteration is None)
        self.step = parts["state"]["step"]
        return int(loaded["iteration"])

    def end_training(self: Any) -> None:
        """Wait for the save under way, and end the training; see `Accelerator.end_training`."""
        self._close_saver()
        super().end_training()  # type: ignore[misc]

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = self._folder = None

    def _parts(self: Any) -> dict[str, Any]:
        """Return the arguments of `save` and `load`: the first model and optimizer, and the rest."""
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        state = {
            "models": models[1:],
            "optimizers": optimizers[1:],
            "schedulers": self._schedulers,
            "objects": self._custom_objects,
            "step": self.step % self.gradient_accumulation_steps,  # micro batches since the last iteration
        }
        if self.scaler is not None:
            state["scaler"] = self.scaler
        loaders = [loader for loader in self._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
        per_rank = {"loaders": loaders} if loaders else None
        return {"model": models[0], "optimizer": optimizers[0], "state": state, "per_rank": per_rank}


def _place(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return the folder of a name with an iteration, and the iteration, or a folder."""
    folder, name = os.path.split(os.path.abspath(path))
    match = _ITERATION.fullmatch(name)
    return (folder, int(match[1])) if match else (os.path.abspath(path), None)
