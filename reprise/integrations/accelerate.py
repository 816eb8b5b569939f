"""An Accelerator's state as arguments for `load` and `AsyncSaver.save`, on any number of processes."""

from __future__ import annotations

from typing import Any


def parts_of(accelerator: Any) -> dict[str, Any]:
    """Return the `load` and `save` arguments for everything an `accelerate.Accelerator` has prepared or registered.

        saver = AsyncSaver("run", max_checkpoint_keep=2)
        start = load("run", **parts_of(accelerator), rng="if_same_ranks", missing_ok=True)["iteration"]
        for step in range(start + 1, 1001):
            ...
            saver.save(step, **parts_of(accelerator), rng=True)
        saver.close()

    These are models, optimizers, schedulers, scaler, stateful loaders and registered objects. The same lines start and
    resume a run, on any number of ranks. They replace `save_state`, whose hooks run after FSDP's files are written, and
    see neither optimizers nor random state. Save after whole iterations: accumulated gradients are not saved.
    """
    models = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    state = {
        "models": models[1:],
        "optimizers": optimizers[1:],
        "schedulers": accelerator._schedulers,
        "objects": accelerator._custom_objects,
        **({} if accelerator.scaler is None else {"scaler": accelerator.scaler}),
    }
    loaders = [loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
    return {
        "model": models[0],
        "optimizer": optimizers[0],
        "state": state,
        "per_rank": {"loaders": loaders} if loaders else None,
    }
