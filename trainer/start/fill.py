"""Fills a run's tensors from its source, and sets the run to the source's position."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from models import families
from reprise.errors import MismatchError
from reprise.format import FRESH, LINEAGE
from reprise.loading import Checkpoint, read_places
from reprise.storage import integer
from trainer.config.checkpoint import CheckpointSection
from trainer.config.load_saved import config_document
from trainer.config.saved import flattened
from trainer.data.position_map import SKIPPED, PositionMap, resume_map
from trainer.metrics.spikes import SPIKES
from trainer.optim.average import begin_average
from trainer.record import resume_rules, run_record
from trainer.record.data_origin import origin_after, reading_state, sources_in
from trainer.record.resume_rules import Difference, differences, settle
from trainer.run.build import Run
from trainer.schedules.lr import DecayStyle
from trainer.schedules.progress import Progress
from trainer.start.decide import Start, require_batches
from trainer.start.identity import note_start
from trainer.start.source import InitialValues, Part

_log = logging.getLogger(__name__)


def fill(run: Run, start: Start) -> None:
    """Fill a run's tensors and records, and set its data as its source requires. Collective.

    Afterwards tied embeddings are a single tensor again, and the run's newer checkpoints are renamed to superseded.

    Raises:
        TrainerError: This run must not continue from the source. Every rank raises, before a byte is copied.
    """
    section, checkpoint = start.section, None
    if run.config.model.is_adapted:
        from trainer.start.base import load_base

        run.description["base"] = load_base(run)
    live = partial(run.state.shards, with_optimizer=start.with_optimizer)
    part = Part("", run.config.model, live, section, partial(_refuse, run, start), start.with_optimizer)
    _, restored = start.source.fill(run, part)
    if restored is not None:
        checkpoint = restored.checkpoint
        for target in run.saves.targets:
            if target.has_state:
                target.saver.note_loaded(restored)
        if restored.loaded_from and run.saves.shared is not None:
            state = checkpoint.state
            run.saves.targets[0].saver.find_saved(checkpoint.iteration, lambda shared: shared.state == state)
        if not section.finetune:
            _resume(run, checkpoint)
    rebind(run)
    if run.state.averages:
        stored = read_places(checkpoint) if checkpoint is not None and start.with_optimizer else {}
        for stage in run.state.parts:  # averages that were not loaded begin with the weights
            begin_average(stage.optimizer, stage.model, stored, families.aliases(run.config.model))
    is_first = isinstance(start.source, InitialValues) and not section.finetune
    began_at = FRESH if is_first else run.state.progress.iteration
    saved = began_at if start.keeps_weights else FRESH
    lineage = note_start(run, start.journal, checkpoint, began_at, is_own=start.is_own, saved=saved)
    run.saves.rewind(began_at, keeps_weights=start.keeps_weights)
    if lineage is not None:
        run.description[LINEAGE] = lineage


def _resume(run: Run, checkpoint: Checkpoint) -> None:
    """Set a run's progress and data to the checkpoint's."""
    seq_length = run.config.train.seq_length
    progress = run_record.saved_progress(checkpoint.state, seq_length=seq_length, where=checkpoint.path)
    if not run.config.train.eval_interval:  # the saved run evaluated, this run does not
        progress = replace(progress, owes_evaluation=False)
    run.state.progress = progress
    _resume_data(run, checkpoint)
    for watch in run.spikes if SPIKES in checkpoint.state else ():
        with reading_state("record of spikes", checkpoint.path):
            watch.resume(checkpoint.state[SPIKES])


def _resume_data(run: Run, checkpoint: Checkpoint) -> None:
    """Set the training data to the checkpoint's positions.

    The checkpoint's gaps lie behind the run, the command's gaps ahead. The data origin counts positions instead of
    samples.
    """
    state, progress, description = checkpoint.state, run.state.progress, run.description
    requested = run.config.train.position_map
    if SKIPPED in state or requested.gaps:
        with reading_state("sample map", checkpoint.path):
            saved, count = PositionMap.from_record(state.get(SKIPPED, [])), integer(state["consumed_samples"])
            lengths = integer(state["batch"]["seq_length"]), run.config.train.seq_length
        resumed = resume_map(saved, requested, count, progress.consumed_samples, lengths=lengths)
        run.train_data = replace(run.train_data, position_map=resumed.map)
        for line in resumed.lines:
            _log.warning(line)
        description.pop(SKIPPED, None)
        if resumed.map.gaps:
            description[SKIPPED] = resumed.map.record()
        state = {**state, "consumed_samples": saved.end(count)}
        progress = replace(progress, consumed_samples=resumed.position)
    origin = origin_after(state, description, progress, where=checkpoint.path, position=run.config.data.position)
    if origin is not None:
        consumed = origin.of(list(sources_in(description)))
        run.train_data = replace(run.train_data, position=origin.position, consumed=consumed)
        description["blend"] = origin.record()


def _refuse(run: Run, start: Start, checkpoint: Checkpoint) -> list[str]:
    """Refuse another run's checkpoint, and return log lines on the allowed differences. Opens no tensor file."""
    section, description, lines = start.section, run.description, list[str]()
    states = resume_rules.compared(checkpoint.state, description, where=checkpoint.path)
    with reading_state("record of its settings", checkpoint.path):
        changes = differences(*states, resume_rules.rules_for(section))
    if changes:
        if not section.no_load_optim:
            changes = resume_rules.with_same_bits(changes, *states)
        lines = _settled(run, section, checkpoint, changes)
    if start.with_optimizer and not checkpoint.has_optimizer:
        raise MismatchError(
            "The checkpoint has no optimizer state: it was saved without it, or `reprise checkpoint prune --optimizer` "
            "dropped it",
            where=checkpoint.path,
            fix="Resume from a checkpoint that has it, with checkpoint.ckpt_step. To continue with zero moments, set "
            "checkpoint.no_load_optim=true; to start at iteration 0 from its weights, set checkpoint.finetune=true.",
        )
    samples = 0
    if not section.finetune:
        length = run.config.train.seq_length
        progress = run_record.saved_progress(checkpoint.state, seq_length=length, where=checkpoint.path)
        origin_after(checkpoint.state, description, progress, where=checkpoint.path)
        samples = progress.consumed_samples
        is_new = any(change.field.startswith("schedule.") for change in changes)
        lines += _rates(run, progress, checkpoint, is_new=is_new)
    if run.config.train.batch_schedule is not None:  # a single size is checked before the ranks join
        require_batches(run.config, run.cluster.world_size, samples)
    return lines


def _settled(run: Run, section: CheckpointSection, checkpoint: Checkpoint, changes: Sequence[Difference]) -> list[str]:
    """Refuse the differences that the command does not allow, and return log lines on the others."""
    saved = _saved_settings(checkpoint)
    return settle(
        [_with_key(change, run, saved) for change in changes],
        allowed=section.allowed,
        where=checkpoint.path,
        **({"problem": "The weights belong to another model than this command's"} if section.finetune else {}),
    )


def _saved_settings(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint's configuration by dotted key. Empty if it has none."""
    return {key.removeprefix("config."): value for key, value in flattened(config_document(checkpoint)).items()}


def _with_key(change: Difference, run: Run, saved: Mapping[str, object]) -> Difference:
    """Return a difference under the key this command sets: for data with both paths, or for the run's length."""
    settings = flattened(run.saved_config["config"])
    if change.field == "data.fingerprint":
        keys = ("data.train", "data.path", "data.kind")
        key = next(key for key in keys if settings[key] is not None)
        was = next((saved[key] for key in keys if saved.get(key)), "unknown data")
        values = f"{was} ({change.saved})", f"{settings[key]} ({change.current})"
        return Difference(key, *values, change.rule)
    unit = change.field.removeprefix("schedule.decay_")
    if unit != change.field and getattr(run.config.schedule, f"lr_decay_{unit}") is None:
        return replace(change, field=f"train.train_{unit}")
    return change


def _rates(run: Run, progress: Progress, checkpoint: Checkpoint, *, is_new: bool) -> list[str]:
    """Return a line on the learning rates for remaining iterations if the schedule ends before them, or is new.

    Raises:
        MismatchError: The learning rate is 0 in every iteration of an extension.
    """
    first, last, train, schedule = progress.iteration + 1, run.last_iteration(progress), run.config.train, run.schedule

    def consumed(iteration: int) -> int:
        return run.batch_schedule.consumed_after(iteration - progress.iteration, progress.consumed_samples)

    begin, length, beyond = (consumed(n) if schedule.is_in_samples else n for n in (first, last, last + 1))
    is_past = schedule.style is not DecayStyle.constant and length > schedule.decay
    if first > last or not (is_new or is_past):
        return []
    key = f"schedule.lr_decay_{'samples' if schedule.is_in_samples else 'iters'}"
    rates, saved = [schedule.at(number, consumed(number)) for number in (first, last)], _saved_settings(checkpoint)
    is_longer = any(saved.get(f"train.{name}") != getattr(train, name) for name in ("train_iters", "train_samples"))
    if max(rates) == 0 < schedule.lr and begin >= schedule.decay and is_longer:
        raise MismatchError(
            "Every remaining iteration has a learning rate of 0",
            where=checkpoint.path,
            expected=f"{key} above {begin - 1}, or schedule.min_lr above 0",
            found=f"{key}={schedule.decay} and schedule.min_lr=0",
            fix=f"Set {key}={beyond} checkpoint.override_scheduler=true: the schedule then ends after the last "
            "iteration.",
        )
    stays = f", where the schedule ends ({key}={schedule.decay})" if is_past else ""
    return [f"learning rate: {rates[0]:.4e} in iteration {first}, {rates[1]:.4e} in iteration {last}{stays}"]


def rebind(run: Run) -> None:
    """Tie the embeddings again."""
    for part in run.state.parts:
        part.model.tie_weights()
