"""The training loop: while iterations remain, step, record, evaluate, save; then stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from models.adapters import model_documents
from reprise.errors import CheckpointError, LockError, ReplicaError, TrainerError
from reprise.format import INTERIM, LINEAGE, STATE
from reprise.saving import SaveReport, SaveResults
from reprise.storage import Document
from trainer.config.saved import RUN_CONFIG
from trainer.config.train import OnNonfinite, OnSpike
from trainer.launch.control import ControlFlags
from trainer.launch.process_group import keep_freed_memory
from trainer.metrics.memory import rank_memory
from trainer.metrics.run_log import IterationRecord
from trainer.metrics.spikes import SPIKES
from trainer.optim.average import averages_in_place
from trainer.run.build import Run
from trainer.run.random import dropout_key
from trainer.saves.targets import Calls, Moment, SaveTarget
from trainer.start.journal import note_saved
from trainer.training.evaluate import evaluate
from trainer.training.rewind import Rewind, react
from trainer.training.step import StepResult, train_step

_log = logging.getLogger(__name__)  # shows lines and warnings on rank 0 only


def train(run: Run) -> Rewind | None:
    """Train a restored run to its last iteration, and save it. A collective call.

    Saves run in the background. A failed save is logged, and training continues.

    Returns:
        The rewind to make if the run stopped at a spike and should skip it, else None.

    Raises:
        TrainerError: The last save failed, so the final state is not on disk.
    """
    state, settings = run.state, run.config.train
    last = run.train_iters
    if state.progress.iteration >= last:
        _log.info(f"iteration {state.progress.iteration} of {last} is reached; nothing is left to train")
    keep_freed_memory(run.cluster.device)
    run.control.begin()
    is_late = state.progress.owes_evaluation
    if is_late:
        _evaluate_late(run)
    for log in run.logs if _should_continue(run) else ():
        log.started(run.start_times)
        if settings.compile:
            _log.info("compiling the model: the first iteration may take minutes")
    if _should_continue(run):  # saves that the interruption prevented
        _save_due(run, Moment.evaluated if is_late else Moment.loaded)
    is_stopped = state.progress.owes_evaluation
    while _should_continue(run):
        flags, result = _train_and_record(run)
        if (rewind := _rewind_at_spike(run, result)) is not None:
            run.profiler.close()
            return rewind
        iteration = state.progress.iteration
        if settings.eval_interval and iteration % settings.eval_interval == 0:
            _evaluate(run)
        is_stopped = flags.stop or state.progress.owes_evaluation
        if flags.exit_on_save_failure and iteration < last and not is_stopped:  # else a last save is tried
            raise _failed_saves(run, run.saves.main)
        if is_stopped or (iteration < last and run.control.exits_after(iteration)):
            _log.info(f"stopping after iteration {iteration}: {run.control.reason(iteration)}")
            break
        if iteration < last:
            _save_due(run, Moment.requested if flags.save else Moment.trained)
    run.profiler.close()
    _save_at_end(run, is_stopped=is_stopped)
    return None


def _save_at_end(run: Run, *, is_stopped: bool) -> None:
    """Save the last state, and wait for the save.

    Args:
        is_stopped: Whether a signal or time limit ends the run, leaving no time to wait for copies.

    Raises:
        TrainerError: The last state is in no checkpoint that outlives the run.
    """
    is_at_end = run.state.progress.iteration >= run.train_iters
    if run.saves.local is not None and not is_stopped:
        run.saves.local.await_copies()
    due = _save_due(run, Moment.finished if is_at_end else Moment.stopped)
    _await_saves(run)
    for target in run.saves.outlasting(due):
        results = target.saver.results
        if results.last_error is not None:
            raise results.last_error if results.failed_saves == 1 else _failed_saves(run, results)
    folder = run.config.checkpoint.folder
    if is_stopped and folder is not None:
        iteration = run.state.progress.iteration
        _log.info(f"the run is saved at iteration {iteration} in {folder}; the same command resumes it")


def _await_saves(run: Run) -> None:
    for target in run.saves.targets:
        target.saver.wait()
        _record_saves(run, target, target.saver.reports())


def _should_continue(run: Run) -> bool:
    progress = run.state.progress
    return progress.iteration < run.train_iters and not progress.owes_evaluation


def _train_and_record(run: Run) -> tuple[ControlFlags, StepResult]:
    """Train an iteration, and record it and the finished saves. Return all ranks' control flags, and the result."""
    saving_s, is_saving = run.saves.take_blocked_s(), run.saves.is_saving
    samples = run.state.progress.consumed_samples
    start = time.perf_counter()
    with run.profiler.around(run.state.progress.iteration + 1):
        result = iterate(run)
    held_back_s = run.saves.take_blocked_s()
    seconds = time.perf_counter() - start - held_back_s
    samples = run.state.progress.consumed_samples - samples
    run.slowdown.add(seconds, samples, is_saving=is_saving)
    if (skipped := result.skipped) is not None:
        _log.warning(f"iteration without a step, the parameters are unchanged: {skipped.where}, {skipped.found}")
    for log in run.logs:
        record = IterationRecord(
            iteration=run.state.progress.iteration,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=_lr(run),
            consumed_samples=run.state.progress.consumed_samples,
            tokens=samples * run.config.train.seq_length,
            seconds=seconds,
            checkpoint_seconds=saving_s + held_back_s,
            data_seconds=result.data_seconds,
            global_batch_size=samples if len(run.batch_schedule.sizes) > 1 else None,
            is_skipped=skipped is not None,
        )
        is_logged = record.iteration % run.config.logging.log_interval == 0 or record.iteration == run.train_iters
        log.iteration(record, rank_memory(run.cluster.device) if is_logged else None)
    for target in run.saves.targets:
        _record_saves(run, target, target.saver.reports())
    return ControlFlags(*(count > 0 for count in result.flags)), result


def _rewind_at_spike(run: Run, result: StepResult) -> Rewind | None:
    """Return the rewind to make after an iteration, if a spike calls for it. A collective call."""
    settings = run.config.train
    for watch in () if result.skipped is not None and settings.on_nonfinite is OnNonfinite.skip else run.spikes:
        spike = watch.add(run.state.progress.iteration, result.loss, result.grad_norm)
        if spike is not None:
            if settings.on_spike is not OnSpike.warn:  # the pending save may be the rewind's target
                _await_saves(run)
            return react(run, watch, spike)
    return None


def iterate(run: Run) -> StepResult:
    """Train an iteration on its batch and count it. A collective call."""
    state, settings = run.state, run.config.train
    progress = state.progress
    iteration, size = progress.iteration + 1, run.batch_schedule.at(progress.consumed_samples)
    numbers, share = run.train_data.numbers_of(size), run.share_of(size)
    run.cluster.activity.begin("the data", iteration)
    start = time.perf_counter()
    micro_batches = run.train_data.train_batch(progress.consumed_samples, settings.seed, size)
    data_seconds = time.perf_counter() - start
    run.cluster.activity.begin("the step", iteration)
    keys = [dropout_key(settings.seed, iteration, micro_batch=number) for number in numbers]
    lr = run.schedule.at(iteration, progress.consumed_samples + size)
    result = train_step(
        state,
        micro_batches,
        keys=keys,
        share=share,
        lr=lr,
        clip_grad=settings.clip_grad,
        context=run.context,
        cluster=run.cluster,
        flags=lambda: run.control.now(failed_saves=run.saves.main.failed_saves),
        skips_nonfinite=settings.on_nonfinite is OnNonfinite.skip or settings.on_spike is OnSpike.rewind,
    )
    state.progress = progress.after_iteration(size, size * settings.seq_length)
    following = run.batch_schedule.at(state.progress.consumed_samples)
    if following != size:
        _log.info(f"the global batch size is {following} after iteration {iteration}, it was {size}")
    return replace(result, data_seconds=data_seconds)


def _evaluate(run: Run) -> None:
    """Evaluate and record the loss, and the moving averages' loss. A signal leaves both to the resumed run."""
    run.cluster.activity.begin("the evaluation", run.state.progress.iteration)
    loss, average_loss = evaluate(run), None
    if run.state.averages and loss is not None:
        for target in run.saves.targets:  # a pending save may still read the parameters
            target.saver.wait()
        with averages_in_place([part.optimizer for part in run.state.parts]):
            average_loss = evaluate(run)
    if loss is None or (average_loss is None and run.state.averages):
        run.state.progress = replace(run.state.progress, owes_evaluation=True)
        _log.info(
            f"the evaluation at iteration {run.state.progress.iteration} was interrupted; the resumed run repeats it",
        )
        return
    run.state.progress = run.state.progress.after_evaluation(loss)
    for log in run.logs:
        log.evaluation(run.state.progress.iteration, loss, run.state.progress.best_loss, average_loss)


def _evaluate_late(run: Run) -> None:
    """Do the interrupted evaluation. This iteration's checkpoints are then saved again, with its loss."""
    _evaluate(run)
    progress = run.state.progress
    if not progress.owes_evaluation:
        for target in run.saves.targets:
            target.saver.mark_outdated(progress.iteration)


def _save_due(run: Run, moment: Moment) -> list[SaveTarget]:
    """Save the current state to the due targets, and return them.

    A save continues in the background unless `checkpoint.async_save=false`.
    """
    iteration = run.state.progress.iteration
    due = run.saves.due(iteration, moment)
    if not due:
        return due
    run.cluster.activity.begin("the save", iteration)
    syncs: Calls = ()
    if run.saves.targets[0] in due:
        run.control.saving()
        syncs = tuple(log.sync for log in run.logs)
    note = partial(note_saved, Path(run.config.run.dir), run.description.get(LINEAGE), iteration)
    for target in due:
        is_interim = moment is Moment.stopped and not target.is_scheduled(iteration)
        notes = (note,) if run.cluster.rank == 0 and target.has_state else ()
        report = target.save(run.state, _documents(run, is_interim=is_interim), syncs=syncs, notes=notes)
        if report is not None:
            _record_saves(run, target, [report])
    return due


def _documents(run: Run, *, is_interim: bool) -> dict[str, Document]:
    """Return the non-tensor files for a checkpoint of the current state."""
    record = run.state.progress.state_record(_lr(run), run.description)
    for watch in run.spikes:
        record[SPIKES] = watch.record()
    return {
        **model_documents(run.config.model),
        STATE: {**record, INTERIM: True} if is_interim else record,
        RUN_CONFIG: run.saved_config,
        **run.tokenizer,
    }


def _lr(run: Run) -> float:
    """Return the last iteration's learning rate."""
    return run.schedule.at(run.state.progress.iteration, run.state.progress.consumed_samples)


def _record_saves(run: Run, target: SaveTarget, reports: Sequence[SaveReport]) -> None:
    for report in reports:
        # Another job holds this folder, or the state is damaged: further training is useless.
        if isinstance(report.error, LockError | ReplicaError):
            raise report.error
        slowdown_s = run.slowdown.take()
        for mirror in run.mirrors:
            mirror.wake()
        for log in run.logs if report.error is None else ():
            log.save(report, slowdown_s=slowdown_s, event=target.event)


def _failed_saves(run: Run, results: SaveResults) -> TrainerError:
    """Return the error for a run whose last saves all failed, at its end or at `checkpoint.exit_on_save_failure`."""
    section = run.config.checkpoint
    return CheckpointError(
        "The last saves of the run failed",
        where=section.folder,
        found=f"{results.failed_saves} failed saves, the last: {str(results.last_error).rstrip('.')}",
        fix="Repair the file system and resume from the newest checkpoint. The limit (0: none) is "
        f"checkpoint.exit_on_save_failure={section.exit_on_save_failure}.",
    )
