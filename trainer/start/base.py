"""The frozen weights beneath adapters, loaded at every start and identified by a digest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from models.adapters import base_of
from reprise.loading import Checkpoint, LoadSource
from reprise.storage import Json
from reprise.stores import location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.interop.source import refuse_adapters
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import differences, settle
from trainer.run.build import Run
from trainer.start.source import Checkpoints, Part, TensorSource, Weights, found_patiently, named_source


def load_base(run: Run) -> Json:
    """Load the weights beneath the adapters, and return their identity for the run's description. Collective.

    They come from `checkpoint.base`, or from `checkpoint.load` with `finetune`. Their identity is a digest without a
    path: a checkpoint's manifest digest, or another program's file digest.

    Raises:
        TrainerError: They are missing or belong to another model. Every rank raises, before a tensor is read.
    """
    section = run.config.checkpoint
    key, name, step, loading = "checkpoint.load", section.load, section.ckpt_step, terms.LOAD
    if section.base is not None:
        key, name, step, loading = "checkpoint.base", section.base, None, terms.BASE
    choice = run.cluster.channel.from_first("base", lambda: found_patiently(lambda: named_source(location(name)), key))
    source: TensorSource = Weights(Path(choice["path"]))
    if choice["kind"] == "checkpoint":
        source = Checkpoints(LoadSource(location(choice["path"]), step, loading))
    settings = CheckpointSection(finetune=True)
    model = base_of(run.config.model)
    identity, _ = source.fill(run, Part("the base", model, run.state.base_shards, settings, partial(_refuse, run)))
    return identity


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


def require_base(checkpoint: Checkpoint, identity: Json) -> None:
    """Refuse a checkpoint of adapters trained on another base. Opens no tensor file."""
    changes = differences({"base": checkpoint.state.get("base")}, {"base": identity}, resume_rules.RULES)
    settle(changes, where=checkpoint.path, problem="The adapters were trained on another base")
