"""The frozen weights beneath adapters, loaded at every start and identified by a digest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from models.adapters import base_of
from reprise.errors import TrainerError
from reprise.loading import Checkpoint, Chooser, LoadSource
from reprise.storage import Json, PatientFiles, failed_read, retry
from reprise.stores import files_of, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.interop.source import refuse_adapters
from trainer.interop.start import open_weights, weights_identity
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import differences, settle
from trainer.run.build import Run
from trainer.start.decide import named_source
from trainer.start.source import Checkpoints, Part, TensorSource, Weights, identity_of


def load_base(run: Run, adapters: TensorSource) -> Json:
    """Load the weights beneath the adapters, and return their identity for the run's description. Collective.

    They come from `checkpoint.base`, or from `checkpoint.load` with `finetune`. In a run, the iteration on which the
    adapters were trained is chosen. Their identity is a digest without a path: a checkpoint's manifest digest, or
    another program's file digest.

    Args:
        adapters: The adapters' own source.

    Raises:
        TrainerError: They are missing, belong to another model, or are not the adapters' base. Every rank raises,
            before a tensor is read.
    """
    section = run.config.checkpoint
    path, step, loading = location(section.load), section.ckpt_step, terms.LOAD
    if section.base is not None:
        path, step, loading = location(section.base), None, terms.BASE

    def choose() -> Json:
        choice = {**named_source(path), "step": step}
        saved = _saved_base(run, adapters) if isinstance(adapters, Checkpoints) else None
        if saved is None:
            return choice
        if choice["kind"] != "checkpoint":
            _require_base(saved, weights_identity(open_weights(Path(choice["path"]))))
            return choice
        folder = LoadSource(location(choice["path"]), step, loading)
        files = files_of(folder.path)
        same = (c.path for c in Chooser(folder, files, lambda _: None).openable() if identity_of(c) == saved[1])
        # The newest may be unreadable for a moment. If it is read and differs, it is refused.
        newest = Chooser(folder, PatientFiles(files), lambda c: _require_base(saved, identity_of(c)))
        return {"kind": "checkpoint", "path": str(next(same, None) or newest.pick()), "step": None}

    def find() -> Json:
        try:
            return retry(choose)
        except OSError as error:
            raise failed_read("The base cannot be read", error, where=path, fix="Correct checkpoint.base.") from error

    choice = run.cluster.channel.from_first("base", find)
    source: TensorSource = Weights(Path(choice["path"]))
    if choice["kind"] == "checkpoint":
        source = Checkpoints(LoadSource(location(choice["path"]), choice["step"], loading))
    settings = CheckpointSection(finetune=True)
    model = base_of(run.config.model)
    part = Part("the base", model, run.state.base_shards, settings, partial(_refuse, run))
    identity, _ = source.fill(run, part)
    return identity


def _saved_base(run: Run, adapters: Checkpoints) -> tuple[Path, Mapping[str, object]] | None:
    """Return the newest readable adapter checkpoint's path and base identity. None without a checkpoint."""
    source, local = adapters.source, run.saves.host_folders if adapters.is_own else None
    with contextlib.suppress(TrainerError, OSError):
        for checkpoint in Chooser(source, files_of(source.path), lambda _: None, local=local).openable():
            base = checkpoint.state.get("base")
            return (checkpoint.path, base) if isinstance(base, Mapping) else None
    return None


def _refuse(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Refuse a base with another model. Return log lines on the allowed differences. Opens no tensor file."""
    refuse_adapters(checkpoint, fix="Set checkpoint.base to the weights that they were trained on, or to merged ones.")
    current = {**run.description, "model": run_record.model_record(base_of(run.config.model))}
    rules = [rule for rule in resume_rules.weight_rules() if rule.field.startswith("model")]
    return settle(
        differences(checkpoint.state, current, rules),
        where=checkpoint.path,
        problem="The base is another model",
        fix="Set the saved model values, or name another base.",
    )


def _require_base(saved: tuple[Path, Mapping[str, object]], identity: Json) -> None:
    """Refuse weights that are not the adapters' own base.

    Args:
        saved: A checkpoint with the adapters, and their base's identity.
    """
    changes = differences({"base": saved[1]}, {"base": identity}, resume_rules.RULES)
    settle(changes, where=saved[0], problem="The adapters were trained on another base")
