"""The frozen weights beneath adapters, loaded at every start and identified by a digest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from models.adapters import base_of
from reprise.errors import TrainerError
from reprise.loading import Checkpoint, Chooser, LoadSource
from reprise.storage import Json, Patience, failed_read
from reprise.stores import files_of, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.interop.source import refuse_adapters
from trainer.interop.start import weights_identity
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import differences, settle
from trainer.run.build import Run
from trainer.start.decide import Start, named_source
from trainer.start.source import Checkpoints, Part, TensorSource, Weights, identity_of

if TYPE_CHECKING:
    from reprise.local import HostFolders

_log = logging.getLogger(__name__)


def load_base(run: Run, start: Start) -> Json:
    """Load the weights beneath the adapters, and return their identity for the run's description. Collective.

    They come from `checkpoint.base`, or from `checkpoint.load` with `finetune`. Their identity is a digest without a
    path: a checkpoint's manifest digest, or another program's file digest.

    Raises:
        TrainerError: They are missing, belong to another model, or are not the adapters' base. Every rank raises,
            before a tensor is read.
    """
    section = run.config.checkpoint
    path = location(section.load if section.base is None else section.base)

    def choose() -> Json:
        try:
            choice = Patience().retry(lambda: named_source(path))
            return Patience().retry(lambda: _same_base(run, choice, start.source))
        except OSError as error:
            raise failed_read("The base cannot be read", error, where=path, fix="Correct checkpoint.base.") from error

    source = _source(section, run.cluster.channel.from_first("base", choose))
    part = Part(
        "the base",
        base_of(run.config.model),
        run.state.base_shards,
        CheckpointSection(finetune=True, verify=section.verify),
        partial(_refuse, run),
    )
    return source.fill(run, part).identity


def _source(section: CheckpointSection, choice: Json) -> TensorSource:
    """Return the tensor source for a choice by `named_source`, or for the exact checkpoint chosen by `_same_base`."""
    path = location(choice["path"])
    if choice["kind"] != "checkpoint":
        return Weights(Path(choice["path"]))
    if section.base is not None:
        return Checkpoints(LoadSource(path, terms=terms.BASE), loads_weights_alone=True)
    source = LoadSource(path, None if choice.get("is_exact") else section.ckpt_step, terms.LOAD)
    return Checkpoints(source, loads_weights_alone=True)


def _same_base(run: Run, choice: Json, adapters: TensorSource) -> Json:
    """Return the chosen base if the adapters were trained on it. In a run, choose the iteration with this identity.

    Rank 0 only. If nothing can be compared yet, the later loads compare and refuse.

    Raises:
        MismatchError: It is another base. The message has both identities.
    """
    saved = _saved_base(run, adapters) if isinstance(adapters, Checkpoints) else None
    if saved is None:
        return choice
    where, expected = saved
    source = _source(run.config.checkpoint, choice)
    if isinstance(source, Weights):
        identity = weights_identity(source.path)
    else:
        assert isinstance(source, Checkpoints)
        newest: Checkpoint | None = None
        for checkpoint in _chooser(run, source.source).openable():
            if identity_of(checkpoint) == dict(expected):
                return {"kind": "checkpoint", "path": str(checkpoint.path), "is_exact": True}
            newest = newest or checkpoint
        if newest is None:
            return choice
        _refuse(run, newest)
        identity = identity_of(newest)
    changes = differences({"base": expected}, {"base": identity}, resume_rules.RULES)
    settle(changes, where=where, problem="The adapters were trained on another base")
    return choice


def _saved_base(run: Run, adapters: Checkpoints) -> tuple[Path, Mapping[str, object]] | None:
    """Return the newest readable adapter checkpoint's path and base identity. None without a checkpoint."""
    local = run.saves.host_folders if adapters.is_own else None
    with contextlib.suppress(TrainerError, OSError):
        for checkpoint in _chooser(run, adapters.source, local).openable():
            base = checkpoint.state.get("base")
            return (checkpoint.path, base) if isinstance(base, Mapping) else None
    return None


def _chooser(run: Run, source: LoadSource, local: HostFolders | None = None) -> Chooser:
    return Chooser(source, files_of(source.path, run.saves.files), lambda _: None, local=local)


def _refuse(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse a base with another model, and log the allowed differences. Opens no tensor file."""
    refuse_adapters(checkpoint, fix="Set checkpoint.base to the weights that they were trained on, or to merged ones.")
    current = {**run.description, "model": run_record.model_record(base_of(run.config.model))}
    rules = [rule for rule in resume_rules.weight_rules() if rule.field.startswith("model")]
    lines = settle(
        differences(checkpoint.state, current, rules),
        where=checkpoint.path,
        problem="The base is another model",
        fix="Set the saved model values, or name another base.",
    )
    for line in lines:
        _log.warning(line)
