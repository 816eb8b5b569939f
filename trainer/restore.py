"""Restores the state of a run: from a checkpoint, from other weights, or from initial values."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from models import families
from models.adapters import adapter_initial_values, is_adapted
from trainer import resume_rules, run_record, terms
from trainer.base_weights import NAMED, OWN, WEIGHTS_KINDS, load_base, log_load, named_source
from trainer.beginning import find_launch, is_directed, note_beginning
from trainer.build import Run
from trainer.checkpoint.format.layout import TensorSpec
from trainer.checkpoint.format.lineage import Lineage
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.loader import check_tensors, fill
from trainer.checkpoint.loading.reader import Checkpoint, open_checkpoint, read_places
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import TRACKER, CheckpointFolder
from trainer.checkpoint.storage.patience import Patience, failed_read
from trainer.checkpoint.tensors.live import LiveTensor, local_of
from trainer.compatibility import differences, settle
from trainer.config.checks import batch_problems
from trainer.config.derived import save_folder
from trainer.config.load_saved import own_command
from trainer.config.saved import saved_config, with_schedule
from trainer.config.schema import CheckpointSection, Verify
from trainer.data_origin import new_source_lines, origin_after, sources_in
from trainer.errors import CheckpointError, MismatchError, TrainerError
from trainer.fitting import Fit, Fitting, fill_unstored
from trainer.identity import find_lineage, note_lineage
from trainer.interop.start import WeightsKind, load_pretrained
from trainer.metrics.jsonl_file import last_recorded_iteration
from trainer.optim import apply_settings
from trainer.optimizers import optimizer_record, settings_record
from trainer.random import fill_initial_values
from trainer.sample_counts import in_samples_of
from trainer.state import checkpoint_specs

_log = logging.getLogger(__name__)


def restore(run: Run) -> bool:
    """Load the checkpoint or weights of `checkpoint.load`, or start fresh. Collective.

    Afterwards the state, the schedule and the progress are those of the checkpoint, tied embeddings are one tensor
    again, and newer checkpoints of this run are renamed to superseded.

    Returns whether the run starts from another run's checkpoint or weights, so that it has no records of earlier
    iterations.

    Raises:
        TrainerError: on every rank, before a byte is copied, if this run must not continue from the checkpoint.
    """
    run.checkpointer.start()
    lineage = find_lineage(run)
    if run.local is not None:
        run.local.start(lineage)
    if run.weights is not None:
        run.weights.start()
    launch, is_restarted = find_launch(run)
    origin, loaded = _agree_on_origin(run, lineage, is_restarted=is_restarted), None
    if origin is None or origin.weights is not None:
        _check_batches(run, 0)
    if is_adapted(run.config.model):
        load_base(run, None if origin is None else origin.source, with_local=origin is not None and origin.is_own)
    if origin is None:
        model = run.config.model
        initial = adapter_initial_values(model) if is_adapted(model) else families.initial_values(model)
        fill_initial_values(run.state.shards(with_optimizer=False), initial, run.config.train.seed)
        if run.cluster.rank == 0:
            _log.info(f"starting fresh, seed {run.config.train.seed}")
    elif origin.weights is not None:
        path = origin.source.path
        section, seed, live = run.config.checkpoint, run.config.train.seed, list(run.state.shards(with_optimizer=False))
        found = load_pretrained(path, origin.weights, live, run.config.model, run.cluster, section, seed=seed)
        log_load(run, found.report, "weights", path)
    else:
        loaded = load_from(run, origin)
    _rebind(run)
    begins_elsewhere = run.config.checkpoint.finetune if origin is None else not origin.goes_on
    began_at = run.state.progress.iteration if origin is not None or begins_elsewhere else -1
    is_own = origin is not None and origin.is_own
    note_lineage(run, lineage, loaded, began_at, is_own=is_own)
    run.checkpointer.rewind(began_at)
    if run.local is not None:
        run.local.rewind(began_at)
    if run.weights is not None:
        run.weights.rewind(began_at if _continues_own(run, origin) else -1)
    if is_directed(run.config.checkpoint):
        note_beginning(run, launch, None if is_restarted else began_at)
    return begins_elsewhere and run.config.checkpoint.load != "auto"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source from which a run loads.

    With `goes_on`, `checkpoint.load` names the run's start, but the run resumes from a checkpoint of its own. The
    settings of the start (ckpt_step, finetune, no_load_optim) do not apply to that checkpoint. With `no_save_optim` its
    own checkpoints have no optimizer, and no_load_optim applies.

    Args:
        weights: the kind of another program's weights; None for a checkpoint.
        is_own: whether it has the checkpoints of this run, so that local ones are candidates as well.
    """

    source: LoadSource
    goes_on: bool
    weights: WeightsKind | None
    is_own: bool = False


def _continues_own(run: Run, origin: Origin | None) -> bool:
    """Return whether the run goes on from a checkpoint of its own, so that the weights saved before it are its own."""
    own, section = save_folder(run.config.checkpoint), run.config.checkpoint
    if origin is None or own is None or origin.weights is not None or (section.finetune and not origin.goes_on):
        return False
    path = origin.source.path.resolve()
    return own.resolve() in (path, *path.parents)


def _agree_on_origin(run: Run, lineage: Lineage, *, is_restarted: bool) -> Origin | None:
    """Choose the source on rank 0 and broadcast it, because ranks may see a file system differently."""
    problem: TrainerError | None = None
    choice = b""
    if run.cluster.rank == 0:
        try:
            choice = Patience().retry(lambda: _find(run, is_restarted=is_restarted))
        except TrainerError as error:
            problem = error
        except OSError as error:
            where = run.config.checkpoint.load
            problem = failed_read("A path cannot be read", error, where=where, fix="Correct checkpoint.load.")
    run.cluster.channel.agree("restore", problem)
    choice = run.cluster.channel.broadcast("restore/source", choice)
    if not choice:
        return None
    kind, path = choice[:1], Path(choice[1:].decode())
    goes_on = kind == OWN
    is_own = goes_on or run.config.checkpoint.load == "auto"
    iteration = None if goes_on else run.config.checkpoint.ckpt_step
    source = LoadSource(path, iteration, terms.LOAD, lineage if is_own else None)
    return Origin(source, goes_on, WEIGHTS_KINDS.get(kind), is_own)


def _find(run: Run, *, is_restarted: bool) -> bytes:
    """Return the kind and the path of the source; empty for a fresh start.

    A path in `checkpoint.load` outside this run's own folder is the start of the run. With `finetune` so is a path
    inside it, such as imported weights. Once the run has its own checkpoint (beyond iteration 0 in the second case),
    the same command resumes from it. A launch that is restarted by its launcher after it has committed a checkpoint
    resumes from it with any command.
    """
    section = run.config.checkpoint
    own = save_folder(section)
    if is_restarted:
        _log.info("this launch was restarted: it resumes from its own newest checkpoint")
        return OWN + str(own).encode()
    if section.load == "none":
        return b""
    folder = None if section.save is None else CheckpointFolder(Path(section.save), Files())
    committed = [] if folder is None else [*folder.committed(), *folder.non_folders()]  # `Chooser` refuses the latter
    if run.local is not None:
        committed += run.local.folders.iterations
    if section.load != "auto":
        named = LoadSource.named(Path(section.load)).path
        is_inside = own is not None and own.resolve() in (named.resolve(), *named.resolve().parents)
        if section.finetune and any(committed) if is_inside else committed:
            _log.info(f"this run began at {named} and resumes from its own checkpoints")
            return OWN + str(own).encode()
        if is_adapted(run.config.model) and section.base is None:
            return b""  # the base, which is loaded for itself: the adapters begin
        return named_source(Path(section.load), with_weights=not is_adapted(run.config.model))
    if committed:
        return NAMED + str(own).encode()
    if section.ckpt_step is not None:
        raise CheckpointError(
            "The requested iteration was never saved",
            where=section.save or "checkpoint.save=null",
            expected=f"iteration {section.ckpt_step}",
            found="no checkpoint",
            fix="Correct checkpoint.ckpt_step.",
        )
    _refuse_lost_checkpoints(run)
    return b""


def _refuse_lost_checkpoints(run: Run) -> None:
    """Refuse a fresh start if the records or the tracker show that checkpoints existed."""
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


def load_from(run: Run, origin: Origin) -> Checkpoint:
    """Load the checkpoint that `origin` names into the run, and return it. A call of all ranks."""
    section = run.config.checkpoint
    if origin.goes_on:
        section = replace(section, finetune=False, no_load_optim=section.no_load_optim and section.no_save_optim)
    with_optimizer = not (section.no_load_optim or section.finetune)
    optimizer = run.config.optimizer.name if with_optimizer else None

    def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
        model = run.config.model
        frozen = run_record.saved_frozen(checkpoint.state, model, where=checkpoint.path)
        return list(checkpoint_specs(model, optimizer, frozen))

    fitting: Fitting | None = None

    def check(checkpoint: Checkpoint) -> None:
        _check_state(run, checkpoint, section)
        fit, places, wanted = _fit(run, checkpoint, section), read_places(checkpoint), specs(checkpoint)
        fit.left([spec.name for spec in wanted])
        wanted = [fit.stored(spec, places.get(spec.name)) for spec in wanted if fit.selects(spec.name)]
        check_tensors(wanted, places, where=checkpoint.path, is_partial=bool(fit.patterns))

    def live(checkpoint: Checkpoint) -> list[LiveTensor]:
        nonlocal fitting
        saved = {spec.name for spec in specs(checkpoint)}  # not the moments of a parameter that was frozen then
        shards = run.state.shards(with_optimizer=with_optimizer)
        fit, tensors = _fit(run, checkpoint, section), [tensor for tensor in shards if tensor.spec.name in saved]
        fill_unstored(fit, tensors, run.config.model, run.config.train.seed)
        fitting = Fitting(fit, tensors, read_places(checkpoint))
        return fitting.requests

    start = time.perf_counter()
    restored = run.restorer.restore(
        origin.source,
        check=check,
        live=live,
        verify=section.verify is not Verify.none,
        verify_all=section.verify is Verify.full,
        with_local=origin.is_own,
    )
    checkpoint = restored.checkpoint
    assert fitting is not None
    _finish(run, checkpoint, fitting)
    run.checkpointer.loaded(restored)
    if run.local is not None:
        run.local.loaded(restored)
    if restored.loaded_from:
        _find_in_shared(run, checkpoint)
    if restored.loaded_from and run.cluster.rank == 0:
        seconds = time.perf_counter() - start
        _log.info(f"loaded iteration {checkpoint.iteration}: {restored.loaded_from}; {seconds:.1f} s")
    report = replace(restored.report, expected=restored.report.expected + fitting.left_count)
    log_load(run, report, f"iteration {checkpoint.iteration}", checkpoint.path)
    if not section.finetune:
        _take_position(run, checkpoint, section)
    return checkpoint


def _take_position(run: Run, checkpoint: Checkpoint, section: CheckpointSection) -> None:
    """Let the run go on where the checkpoint has it: its progress, its data and, if asked for, its schedule."""
    seq_length = run.config.train.seq_length
    run.state.progress = run_record.saved_progress(checkpoint.state, seq_length=seq_length, where=checkpoint.path)
    _take_data_origin(run, checkpoint)
    if section.use_checkpoint_scheduler:
        _take_schedule(run, checkpoint)


def _take_data_origin(run: Run, checkpoint: Checkpoint) -> None:
    """Let every source of training data go on where the checkpoint has it, and say where a new one begins."""
    state, progress, position = checkpoint.state, run.state.progress, run.config.data.position
    origin = origin_after(state, run.description, progress, where=checkpoint.path, position=position)
    files = [(source.path, source.count) for source in run.train_data.samples.sources]
    lines = new_source_lines(state, run.description, origin, progress.consumed_samples, files)
    for line in lines if run.cluster.rank == 0 else ():
        _log.warning(line)
    if origin is not None:
        consumed = origin.of(list(sources_in(run.description)))
        run.train_data = run.train_data.starting_at(origin.position, consumed)
        run.description = {**run.description, "blend": origin.record()}


def _fit(run: Run, checkpoint: Checkpoint, section: CheckpointSection) -> Fit:
    """Return how the weights of a checkpoint may differ from the run's."""
    model = run.config.model
    saved = run_record.saved_model(checkpoint.state, where=checkpoint.path) if section.resize else model
    return Fit.of(section, saved, model)


def _finish(run: Run, checkpoint: Checkpoint, fitting: Fitting) -> None:
    """Complete the tensors that a checkpoint holds in another form, and name those that it was not to fill."""
    problem: TrainerError | None = None
    places = read_places(checkpoint)
    try:
        fitting.finish(lambda tensor: fill(checkpoint, places, [tensor]))
    except TrainerError as error:
        problem = error
    run.cluster.channel.agree("restore/fitted", problem)
    names = [spec.name for spec in checkpoint_specs(run.config.model, None)]
    for line in fitting.notes(names, where=checkpoint.path) if run.cluster.rank == 0 else ():
        _log.warning(line)


def _find_in_shared(run: Run, checkpoint: Checkpoint) -> None:
    """Note that the shared folder has the iteration of a local checkpoint too, if it has. A call of all ranks."""
    found = b""
    save = run.config.checkpoint.save
    if run.cluster.rank == 0 and save is not None:
        try:
            there = open_checkpoint(CheckpointFolder(Path(save), Files()).iteration(checkpoint.iteration), Files())
            if there.state == checkpoint.state:
                found = b"o" if there.has_optimizer else b"w"
        except TrainerError as error:
            _log.debug("iteration %d is saved again: %s", checkpoint.iteration, error)
    found = run.cluster.channel.broadcast("restore/shared", found)
    if found:
        run.checkpointer.has_already(checkpoint.iteration, has_optimizer=found == b"o")


def _check_state(run: Run, checkpoint: Checkpoint, section: CheckpointSection) -> None:
    """Refuse a checkpoint of another run, and log the allowed differences. Opens no tensor file."""
    found = differences(*resume_rules.compared(checkpoint.state, run.description), resume_rules.rules_for(section))
    if not section.no_load_optim:
        found = resume_rules.with_same_bits(found, checkpoint.state, run.description)
    otherwise = own_command(checkpoint, run.config.run)
    for line in settle(found, flags=resume_rules.flags_set(section), where=checkpoint.path, otherwise=otherwise):
        _log.warning(line)
    if not (checkpoint.has_optimizer or section.no_load_optim or section.finetune):
        raise MismatchError(
            "The checkpoint has no optimizer state: it was saved with checkpoint.no_save_optim, or as weights alone",
            where=checkpoint.path,
            fix="To continue with zero moments, set checkpoint.no_load_optim=true; to start at iteration 0 from its "
            "weights, set checkpoint.finetune=true.",
        )
    samples = 0
    if not section.finetune:
        length = run.config.train.seq_length
        progress = run_record.saved_progress(checkpoint.state, seq_length=length, where=checkpoint.path)
        origin_after(checkpoint.state, run.description, progress, where=checkpoint.path)
        samples = progress.consumed_samples
    _check_batches(run, samples)
    if section.use_checkpoint_scheduler:
        run_record.saved_schedule(checkpoint.state, run.config.optimizer, where=checkpoint.path)


def _check_batches(run: Run, consumed_samples: int) -> None:
    """Refuse global batch sizes from a position on that the ranks cannot divide.

    Raises:
        MismatchError: on every rank, listing them.
    """
    found = batch_problems(run.config, run.cluster.world_size, consumed_samples)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise MismatchError(f"The run cannot go on from sample {consumed_samples}:\n{lines}\nNothing was trained")


def _take_schedule(run: Run, checkpoint: Checkpoint) -> None:
    asked = run.config.optimizer
    state = in_samples_of(run.config.train.seq_length, checkpoint.state)
    run.schedule, section = run_record.saved_schedule(state, asked, where=checkpoint.path)
    for part in run.state.parts:
        apply_settings(part.optimizer, run.config.model, part.model, section)
    taken = {"schedule": state["schedule"], **settings_record(section)}
    taken["optimizer"] = optimizer_record(run.config.model, section, run.state.frozen)
    run.description = {**run.description, **taken}
    config = with_schedule(replace(run.config, optimizer=section), run.schedule)
    known = run.saved_config["config"]
    taken_config = {name: saved_config(config)[name] for name in ("schedule", "optimizer")}
    run.saved_config = {**run.saved_config, "config": {**known, **taken_config}}


def _rebind(run: Run) -> None:
    """Tie the embeddings again and check that they share memory.

    Raises:
        CheckpointError: if they are not.
    """
    for part in run.state.parts:
        part.model.tie_weights()
        named = dict(part.model.named_parameters(remove_duplicate=False))
        for alias, name in families.aliases(run.config.model).items():
            both_here = alias in named and name in named
            if both_here and local_of(named[alias]).data_ptr() != local_of(named[name]).data_ptr():
                raise CheckpointError("Tied parameters are two tensors", where=f"{alias} and {name}")
