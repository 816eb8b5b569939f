"""transformers' Trainer with Reprise checkpoints, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reprise.api import load, load_state_dict
from reprise.async_saver import AsyncSaver
from reprise.errors import ConfigError
from reprise.nested.random_state import RandomState
from reprise.storage.folder import iteration_name
from reprise.stores.locations import location

# Key endings with different values on each rank: its role, and times.
_OF_A_RANK = ("_process_zero", "_runtime", "_per_second")


class SavesWithReprise:
    """A mixin for `transformers.Trainer` and its subclasses, which saves in the background.

        class Trainer(SavesWithReprise, transformers.Trainer): ...

        Trainer(...).train(resume_from_checkpoint=True)

    Checkpoints are `output_dir/iter_<step>`, with the model, optimizer, learning rate schedule, loss scale, random
    state and the Trainer's own state. `save_strategy` and `save_steps` control when to save, and `save_total_limit` how
    many checkpoints to keep. The same line starts and resumes a run, under DDP and FSDP2, on any number of ranks. Pass
    a path to resume from another folder or a single iteration.
    """

    def train(self: Any, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train from the newest checkpoint, or from scratch if there is none; see `Trainer.train`.

        Args:
            resume_from_checkpoint: True for `output_dir`, or a path as in `reprise.load`.

        Raises:
            ConfigError: A Trainer setting needs the Trainer's own checkpoints.
            TrainerError: A checkpoint cannot be loaded, or a save failed.
        """
        if self.args.load_best_model_at_end or self.args.save_only_model:
            raise ConfigError(
                "A Trainer setting requires the Trainer's own checkpoints",
                found="load_best_model_at_end or save_only_model",
                fix="Remove it, and load the best iteration by number.",
            )
        path = resume_from_checkpoint if isinstance(resume_from_checkpoint, str | Path) else None
        self._source = location(path or self.args.output_dir)
        saved, iteration = dict[str, Any](trainer={}), 0
        if resume_from_checkpoint:
            iteration = load_state_dict(self._source, saved, missing_ok=path is None)["iteration"]
        self._saver = AsyncSaver(self.args.output_dir, max_checkpoint_keep=self.args.save_total_limit or 0)
        with self._saver, TemporaryDirectory() as folder:
            if iteration:  # the Trainer reads its step and data position from here
                type(self.state)(**saved["trainer"]).save_to_json(f"{folder}/trainer_state.json")
            return super().train(folder if iteration else None, *args, **options)  # type: ignore[misc]

    def _objects(self: Any) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {"schedule": self.lr_scheduler, **({} if scaler is None else {"scaler": scaler})}

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        callbacks = [*self.callback_handler.callbacks, self.control]
        self.state.stateful_callbacks.update(
            {type(each).__name__: each.state() for each in callbacks if callable(getattr(each, "state", None))}
        )
        trainer = json.loads(  # the values that are equal on all ranks
            json.dumps(dataclasses.asdict(self.state)),
            object_hook=lambda table: {key: table[key] for key in table if not key.endswith(_OF_A_RANK)},
        )
        state = {**self._objects(), "trainer": trainer}
        self._saver.save(self.state.global_step, self.model, self.optimizer.optimizer, state=state, rng=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the weights are loaded together with the optimizer."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is not None:
            step = self.state.global_step
            load(
                self._source,
                self.model,
                self.optimizer.optimizer,
                state=self._objects(),
                rng="if_same_ranks",
                iteration=None if self._source.name == iteration_name(step) else step,
            )
            self._random_state = RandomState().state_dict()

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is not None:  # after the Trainer has skipped the used batches
            RandomState().load_state_dict(self._random_state)
