"""torchtitan's checkpoint manager with Reprise checkpoints, on any number of ranks."""

from __future__ import annotations

import os
from typing import Any

from reprise.api import load_state_dict
from reprise.async_saver import AsyncSaver
from reprise.errors import ConfigError


class RepriseManager:
    """A mixin for torchtitan's `BaseCheckpointManager`, which saves in the background.

        class CheckpointManager(RepriseManager, BaseCheckpointManager):
            @dataclass(kw_only=True, slots=True)
            class Config(BaseCheckpointManager.Config): ...

        Trainer.Config(checkpoint=CheckpointManager.Config(enable=True, interval=100, keep_latest_k=2), ...)

    Checkpoints are `folder/iter_<step>`. The last one is complete too. torchtitan's data loaders cannot continue with
    another data parallel size: `exclude_from_loading=["dataloader"]` restarts the data there.
    """

    save_future = None

    def __init__(
        self, config: Any, *, dataloader: Any, model_parts: Any, optimizers: Any, lr_schedulers: Any, **others: Any
    ) -> None:
        """Keep the Trainer's objects.

        Raises:
            ConfigError: A setting needs other checkpoint files.
        """
        self.enable = config.enable
        self._config, self._parts, self._optimizers, self._loader = config, model_parts, optimizers, dataloader
        self._folder = os.path.join(others.get("base_folder", ""), config.folder)
        self._states = {**others["states"], "lr_scheduler": lr_schedulers}
        self._saver: AsyncSaver | None = None
        if config.enable and (config.initial_load_path or config.initial_load_in_hf or config.last_save_in_hf):
            raise ConfigError(
                "A checkpoint setting needs torchtitan's own manager",
                found="initial_load_path, initial_load_in_hf or last_save_in_hf",
                fix="Remove it. To load initial weights, use torchtitan's own manager for the first start.",
            )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        if self._saver is None:
            self._saver = AsyncSaver(self._folder, max_checkpoint_keep=config.keep_latest_k)
        self._saver.save_state_dict(curr_step, self._contents())
        return True

    def _load(self, step: int = -1) -> bool:
        taken = {key: value for key, value in self._contents().items() if key not in self._config.exclude_from_loading}
        iteration = None if step == -1 else step
        loaded = load_state_dict(self._folder, taken, iteration=iteration, missing_ok=iteration is None)["iteration"]
        if loaded:
            for part in self._parts:
                part.load_state_dict(taken["model"], strict=False)
            for key, each in (("optimizer", self._optimizers), ("dataloader", self._loader)):
                if taken.get(key):
                    each.load_state_dict(taken[key])
        return bool(loaded)

    def _contents(self) -> dict[str, Any]:
        """Return a rank's checkpoint content: its part of the model, the optimizers and the data."""
        model = {name: tensor for part in self._parts for name, tensor in part.state_dict().items()}
        data = {"dataloader": self._loader.state_dict()} if self._loader is not None else {}
        return {"model": model, "optimizer": self._optimizers.state_dict(), **data, **self._states}

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: a save copies everything before it returns."""

    def _wait_for_saving(self) -> None:
        """Return at once: `save_future` stays None."""

    def _close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = None
