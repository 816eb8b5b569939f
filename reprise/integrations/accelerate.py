"""accelerate's `save_state` and `load_state` with Reprise checkpoints, on any number of processes."""

from __future__ import annotations

import os
import re
from typing import Any

from reprise.api import load
from reprise.async_saver import AsyncSaver
from reprise.errors import ConfigError
from reprise.storage.folder import iteration_name

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
    random state. The same line starts and resumes a run, on any number of ranks. accelerate's hooks run after FSDP's
    files are written, and see neither optimizers nor random state, so this mixin replaces them.
    """

    max_checkpoint_keep = 0  # how many of the newest checkpoints to keep; 0 keeps all

    _folder: str | None = None
    _saver: AsyncSaver | None = None

    def save_state(self: Any, output_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> str:
        """Save in the background, and return the checkpoint's future path. Call on all ranks.

        Args:
            output_dir: `FOLDER/step_N`, or `iter_N`, `epoch_N` or `checkpoint-N`. N is the iteration.

        Raises:
            ConfigError: The name has no iteration, or a hook would write its own files.
            TrainerError: The previous save failed, or a value cannot be saved.
        """
        folder, iteration = _place(output_dir)
        if iteration is None or self._save_model_state_pre_hook:
            raise ConfigError(
                "save_state needs an iteration in the name, and does not run hooks",
                expected="a name such as step_40",
                found=str(output_dir) if iteration is None else "a hook of register_save_state_pre_hook",
                fix="Pass your own objects to register_for_checkpointing.",
            )
        if folder != self._folder:
            self._close_saver()
            self._folder, self._saver = folder, AsyncSaver(folder, max_checkpoint_keep=self.max_checkpoint_keep)
        self._saver.save(iteration, **self._parts(), rng=True)
        return os.path.join(folder, iteration_name(iteration))

    def load_state(self: Any, input_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> int:
        """Load a folder's newest checkpoint, and return its iteration, or 0 if there is none yet.

        Args:
            input_dir: The folder, or a name as for `save_state`, which selects that iteration.

        Raises:
            TrainerError: See `reprise.load`.
        """
        if self._saver is not None:
            self._saver.wait()
        folder, iteration = _place(input_dir)
        parts = self._parts()
        loaded = load(folder, **parts, rng="if_same_ranks", iteration=iteration, missing_ok=iteration is None)
        self.step = parts["state"]["step"]
        return int(loaded["iteration"])

    def end_training(self: Any) -> None:
        """Wait for the running save, and end training; see `Accelerator.end_training`."""
        self._close_saver()
        super().end_training()  # type: ignore[misc]

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = self._folder = None

    def _parts(self: Any) -> dict[str, Any]:
        """Return the arguments for `save` and `load`: the first model and optimizer, and the rest."""
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        state = {
            "models": models[1:],
            "optimizers": optimizers[1:],
            "schedulers": self._schedulers,
            "objects": self._custom_objects,
            "step": self.step % self.gradient_accumulation_steps,  # micro-batches since the last iteration
        }
        if self.scaler is not None:
            state["scaler"] = self.scaler
        loaders = [loader for loader in self._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
        per_rank = {"loaders": loaders} if loaders else None
        return {"model": models[0], "optimizer": optimizers[0], "state": state, "per_rank": per_rank}


def _place(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Split a name into its folder and iteration. Any other path is a folder, with None."""
    folder, name = os.path.split(os.path.abspath(path))
    match = _ITERATION.fullmatch(name)
    return (folder, int(match[1])) if match else (os.path.abspath(path), None)
