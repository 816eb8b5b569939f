"""Restores the state of a run: from a checkpoint, from other weights, or from initial values."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from models import families
from models.adapters import adapter_initial_values, is_adapted
from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.layout import TensorSpec
from reprise.live_tensors import LiveTensor, local_of
from reprise.reading import Checkpoint, check_tensors, fill, open_checkpoint, read_places
from trainer.config.checks import batch_problems
from trainer.config.load_saved import own_command
from trainer.config.saved import saved_config, with_schedule
from trainer.config.schema import CheckpointSection, Verify
from trainer.interop.start import load_pretrained
from trainer.optim.adamw import apply_settings
from trainer.optim.table import optimizer_record, settings_record
from trainer.record import resume_rules, run_record
from trainer.record.compatibility import differences, settle
from trainer.record.data_origin import new_source_lines, origin_after, sources_in
from trainer.record.sample_counts import in_samples_of
from trainer.run.build import Run
from trainer.run.fitting import Fit, Fitting, fill_unstored
from trainer.run.random import fill_initial_values
from trainer.run.saves import SharedTarget
from trainer.run.state import checkpoint_specs
from trainer.start.base_weights import load_base, log_load
from trainer.start.beginning import find_launch, is_directed, note_beginning
from trainer.start.identity import find_lineage, note_lineage
from trainer.start.origin import Origin, agree_on_origin, continues_own

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
    lineage = run.saves.start(lambda: find_lineage(run))
    launch, is_restarted = find_launch(run)
    origin, loaded = agree_on_origin(run, lineage, is_restarted=is_restarted), None
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
    for target in run.saves:
        target.rewind(began_at, is_own=continues_own(run, origin))
    if is_directed(run.config.checkpoint):
        note_beginning(run, launch, None if is_restarted else began_at)
    return begins_elsewhere and run.config.checkpoint.load != "auto"


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
    for target in run.saves:
        target.loaded(restored)
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
    iteration = checkpoint.iteration

    def has_optimizer() -> bool | None:
        try:
            shared = open_checkpoint(folder.iteration(iteration), folder.files)
        except TrainerError as error:
            _log.debug("iteration %d is saved again: %s", iteration, error)
            return None
        return shared.has_optimizer if shared.state == checkpoint.state else None

    for target in run.saves:
        if isinstance(target, SharedTarget):
            folder = target.folder
            has_it = run.cluster.channel.from_first("restore/shared", has_optimizer)
            if has_it is not None:
                target.saver.has_already(iteration, has_optimizer=has_it)


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
