"""Brings a run to where it begins: a checkpoint's state, or fresh initial values."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import models
from trainer import run_record as record
from trainer.build import Run
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.loader import LoadReport, check_tensors
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.storage.files import Files, cannot_write
from trainer.checkpoint.storage.folder import TRACKER, CheckpointFolder
from trainer.checkpoint.storage.patience import Patience, failed_read
from trainer.checkpoint.tensors.live import LiveTensor, local_of, parameter_names
from trainer.compatibility import differences, settle
from trainer.config.schema import CheckpointSection, Verify
from trainer.errors import CheckpointError, MismatchError, TrainerError
from trainer.interop.hf.folder import is_folder
from trainer.interop.llmc.file import WEIGHTS, foreign
from trainer.interop.megatron import refuse_megatron
from trainer.interop.start import WeightsKind as WeightsKind
from trainer.interop.start import load_pretrained
from trainer.launch.relaunch import has_committed, note
from trainer.metrics.run_log import last_recorded_iteration
from trainer.random import fill_initial_values
from trainer.state import checkpoint_specs

_log = logging.getLogger(__name__)

# In rank 0's message, before a path: a checkpoint of ours, checkpoints of this run that goes on, or weights of others.
_NAMED, _OWN = b"c", b"o"
_WEIGHTS = {b"p": WeightsKind.folder, b"f": WeightsKind.file}


def restore(run: Run) -> bool:
    """Load what `checkpoint.load` names, or start fresh. A call of all ranks.

    Afterwards the state, the schedule and the progress are those of the checkpoint, tied embeddings are one tensor
    again, and checkpoints of this run that are newer are out of the way.

    Returns whether the run begins at what `checkpoint.load` names, so that it has no records of the iterations before.

    Raises:
        TrainerError: on every rank, before a byte was copied, if the checkpoint is not one that this run may continue.
    """
    run.checkpointer.start()
    origin = _agree_on_origin(run)
    if origin is None:
        initial = models.initial_values(run.config.model)
        fill_initial_values(run.state.shards(with_optimizer=False), initial, run.config.train.seed)
        if run.cluster.rank == 0:
            _log.info(f"starting fresh, seed {run.config.train.seed}")
    elif origin.weights is not None:
        path = origin.source.path
        report = load_pretrained(path, origin.weights, run.state, run.cluster, run.config.checkpoint)
        _log_load(run, report, "weights", path)
    else:
        _load(run, origin)
    _rebind(run)
    began_at = run.state.progress.iteration if origin is not None else -1
    run.checkpointer.rewind(began_at)
    if _is_directed(run.config.checkpoint):
        _note_beginning(run, began_at)
    return origin is not None and not origin.goes_on and run.config.checkpoint.load != "auto"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run loads from.

    With `goes_on`, `checkpoint.load` names where the run began, and it goes on from a checkpoint of its own: what the
    command says of the beginning (ckpt_step, finetune, no_load_optim) says nothing of that. With `no_save_optim` its
    own checkpoints have no optimizer either, and no_load_optim stays.

    Args:
        weights: what holds weights of another program; None for a checkpoint of ours.
    """

    source: LoadSource
    goes_on: bool
    weights: WeightsKind | None


def _is_directed(section: CheckpointSection) -> bool:
    """Return whether the command says more of the beginning than to go on from the newest checkpoint."""
    return section.load != "auto" or section.ckpt_step is not None or section.finetune or section.no_load_optim


def _has_committed(run: Run) -> bool:
    """Return whether this is a restart of a launch that has checkpoints of its own. Rank 0 only."""
    section = run.config.checkpoint
    if section.save is None or not _is_directed(section):
        return False
    return has_committed(CheckpointFolder(Path(section.save), Files()), run.cluster.launch)


def _note_beginning(run: Run, began_at: int) -> None:
    """Write down where this launch began, so that a restart of it goes on. A call of all ranks."""
    problem: TrainerError | None = None
    save = run.config.checkpoint.save
    if run.cluster.rank == 0 and save is not None and run.cluster.launch.names:
        try:
            folder = CheckpointFolder(Path(save), Files())
            note(folder, run.cluster.launch, None if _has_committed(run) else began_at)
        except OSError as error:
            problem = cannot_write(Path(save), error)
        except TrainerError as error:
            problem = error
    run.cluster.channel.agree("beginning", problem)


def _agree_on_origin(run: Run) -> Origin | None:
    """Let rank 0 decide where to load from, and tell all: file systems may show ranks different things."""
    problem: TrainerError | None = None
    choice = b""
    if run.cluster.rank == 0:
        try:
            choice = Patience().retry(lambda: _find(run))
        except TrainerError as error:
            problem = error
        except OSError as error:
            where = run.config.checkpoint.load
            problem = failed_read("A path cannot be looked at", error, where=where, fix="Correct checkpoint.load.")
    run.cluster.channel.agree("restore", problem)
    choice = run.cluster.channel.broadcast("restore/source", choice)
    if not choice:
        return None
    kind, path = choice[:1], Path(choice[1:].decode())
    goes_on = kind == _OWN
    source = LoadSource(path, None if goes_on else run.config.checkpoint.ckpt_step)
    return Origin(source, goes_on, _WEIGHTS.get(kind))


def _find(run: Run) -> bytes:
    """Return the kind and the path of what to load; nothing is a fresh start.

    A path that `checkpoint.load` names outside this run's own folder is where the run begins; with `finetune` one
    inside it is too, as weights that were imported there are. Once the run has a checkpoint of its own, which is of an
    iteration beyond 0 in the second case, the same command goes on from that. So does, whatever the command says, a
    launch that its launcher has started again once it has committed a checkpoint.
    """
    section = run.config.checkpoint
    if _has_committed(run):
        _log.info("this launch was started again: it goes on from its own newest checkpoint")
        return _OWN + str(section.save).encode()
    if section.load == "none":
        return b""
    own = None if section.save is None else Path(section.save)
    folder = None if own is None else CheckpointFolder(own, Files())
    committed = [] if folder is None else [*folder.committed(), *folder.strange()]  # `Chooser` refuses the latter
    if section.load != "auto":
        named = LoadSource.named(Path(section.load)).path
        is_inside = own is not None and own.resolve() in (named.resolve(), *named.resolve().parents)
        if section.finetune and any(committed) if is_inside else committed:
            _log.info(f"this run began at {named} and goes on from its own checkpoints")
            return _OWN + str(own).encode()
        return _named(Path(section.load))
    if committed:
        return _NAMED + str(own).encode()
    if section.ckpt_step is not None:
        raise CheckpointError(
            "An iteration was never saved",
            where=section.save or "checkpoint.save=null",
            expected=f"iteration {section.ckpt_step}",
            found="no checkpoint",
            fix="Correct checkpoint.ckpt_step.",
        )
    _refuse_lost_checkpoints(run)
    return b""


def _refuse_lost_checkpoints(run: Run) -> None:
    """Refuse a fresh start where the records or the tracker show that there were checkpoints."""
    metrics, save = Path(run.config.run.dir) / "metrics.jsonl", run.config.checkpoint.save
    last = last_recorded_iteration(metrics)
    own = None if save is None else CheckpointFolder(Path(save), Files())
    tracked = None if own is None else own.tracker()
    if last is not None:
        raise CheckpointError(
            "This run has recorded iterations but has no checkpoint to continue from",
            where=metrics,
            expected=f"a checkpoint in {save}" if save else "a checkpoint, but checkpoint.save is null",
            found=f"{last} as the last iteration and no iter_ folder",
            fix="Mount or restore the checkpoints, or start over with checkpoint.load=none.",
        )
    if own is not None and tracked is not None:
        raise CheckpointError(
            "The tracker names a checkpoint, but there is none to continue from",
            where=own.root / TRACKER,
            expected=f"the folder {own.iteration(tracked).name}",
            found="no iter_ folder",
            fix="Restore the checkpoints, or start over with checkpoint.load=none.",
        )


def _named(path: Path) -> bytes:
    """Return the kind and the path of what a person has named, who may name a run by its own folder.

    Raises:
        CheckpointError: for a file that no run can begin with.
        MismatchError: for a checkpoint of Megatron.
    """
    refuse_megatron(path)
    if path.is_file():
        found = foreign(path)
        if found is not None:
            raise CheckpointError(
                "A file is of no format that a run can begin with",
                where=path,
                expected=f"weights of llm.c, with {WEIGHTS}",
                found=found,
                fix="Name a run, a checkpoint, a model folder of transformers or such a file with checkpoint.load; "
                "trainer.commands.convert imports other formats.",
            )
        return b"f" + str(path).encode()
    return b"p" + str(path).encode() if is_folder(path) else _NAMED + str(LoadSource.named(path).path).encode()


def _load(run: Run, origin: Origin) -> None:
    section = run.config.checkpoint
    if origin.goes_on:
        section = replace(section, finetune=False, no_load_optim=section.no_load_optim and section.no_save_optim)
    with_optimizer = not (section.no_load_optim or section.finetune)
    specs = list(checkpoint_specs(run.config.model, with_optimizer=with_optimizer))

    def check(checkpoint: Checkpoint) -> None:
        _check_state(run, checkpoint, section)
        check_tensors(specs, read_places(checkpoint), where=checkpoint.path)

    def live(_: Checkpoint) -> list[LiveTensor]:
        return list(run.state.shards(with_optimizer=with_optimizer))

    restored = run.restorer.restore(
        origin.source,
        check=check,
        live=live,
        verify=section.verify is not Verify.none,
        verify_all=section.verify is Verify.full,
    )
    checkpoint = restored.checkpoint
    run.checkpointer.loaded(restored)
    _log_load(run, restored.report, f"iteration {checkpoint.iteration}", checkpoint.path)
    if section.finetune:
        return
    seq_length = run.config.train.seq_length
    run.state.progress = record.saved_progress(checkpoint.state, seq_length=seq_length, where=checkpoint.path)
    if section.use_checkpoint_scheduler:
        _take_schedule(run, checkpoint)


def _check_state(run: Run, checkpoint: Checkpoint, section: CheckpointSection) -> None:
    """Refuse a checkpoint of another run; log the differences that are allowed. Opens no tensor file."""
    found = differences(*record.compared(checkpoint.state, run.description), record.rules_for(section))
    for line in settle(found, flags=record.flags_set(section), where=checkpoint.path):
        _log.warning(line)
    if not (checkpoint.has_optimizer or section.no_load_optim or section.finetune):
        raise MismatchError(
            "The checkpoint has no optimizer state: it was saved with checkpoint.no_save_optim=true",
            where=checkpoint.path,
            fix="To go on with zero moments set checkpoint.no_load_optim=true; to start at iteration 0 from its "
            "weights set checkpoint.finetune=true.",
        )
    if not section.finetune:
        record.saved_progress(checkpoint.state, seq_length=run.config.train.seq_length, where=checkpoint.path)
    if section.use_checkpoint_scheduler:
        record.saved_schedule(checkpoint.state, where=checkpoint.path)


def _take_schedule(run: Run, checkpoint: Checkpoint) -> None:
    run.schedule, adam = record.saved_schedule(checkpoint.state, where=checkpoint.path)
    no_decay = record.no_decay_names(run.config.model)
    for part in run.state.parts:
        names = parameter_names(part.model)
        for group in part.optimizer.param_groups:
            group["betas"], group["eps"] = (adam["beta1"], adam["beta2"]), adam["eps"]
            # Which group decays is told by its names: the rate that the command gave it may be 0.
            group["weight_decay"] = 0.0 if names[group["params"][0]] in no_decay else adam["weight_decay"]
    taken = {key: checkpoint.state[key] for key in ("schedule", "adam")}
    taken["optimizer"] = record.optimizer_record(run.config.model, adam["weight_decay"])
    run.description = {**run.description, **taken}


def _rebind(run: Run) -> None:
    """Bind tied embeddings again and check that they are one memory.

    Raises:
        CheckpointError: if they are not.
    """
    for part in run.state.parts:
        part.model.tie_weights()
        named = dict(part.model.named_parameters(remove_duplicate=False))
        for alias, name in models.aliases(run.config.model).items():
            both_here = alias in named and name in named
            if both_here and local_of(named[alias]).data_ptr() != local_of(named[name]).data_ptr():
                raise CheckpointError("Tied parameters are two tensors", where=f"{alias} and {name}")


def _log_load(run: Run, report: LoadReport, what: str, path: Path) -> None:
    filled_bytes = sum(row[0] for row in run.cluster.gather([float(report.filled_bytes)]))
    if run.cluster.rank == 0:
        rate = filled_bytes / max(report.seconds, 1e-9) / 1e9
        _log.info(
            f"loaded {report.tensors} of {report.expected} tensors, {filled_bytes:.0f} bytes, {report.seconds:.2f} s, "
            f"{rate:.2f} GB/s: {what} from {path}"
        )
