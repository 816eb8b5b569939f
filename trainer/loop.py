"""The training loop: while iterations remain, step, record, evaluate, save; then stop."""

from __future__ import annotations

import logging
import time

import models
from trainer import record
from trainer.build import Run
from trainer.evaluate import evaluate
from trainer.metrics import IterationRecord
from trainer.random import dropout_key
from trainer.step import StepResult, train_step
from trainer.stop import should_exit
from trainer.tied import check_tied_copies

_log = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Bring a restored run to its last iteration, and save there. A call of all ranks.

    A failed save is logged and training goes on.

    Raises:
        TrainerError: if the last save failed: the run ends without its state on disk.
    """
    state, settings = run.state, run.config.train
    if state.progress.iteration >= settings.train_iters and run.cluster.rank == 0:
        _log.info(
            f"iteration {state.progress.iteration} of {settings.train_iters} is reached, there is nothing to train"
        )
    blocked_s = 0.0
    while state.progress.iteration < settings.train_iters:
        start = time.perf_counter()
        result = _iterate(run)
        _record(run, result, seconds=time.perf_counter() - start, blocked_s=blocked_s)
        iteration = state.progress.iteration
        if settings.eval_interval and iteration % settings.eval_interval == 0:
            _evaluate(run)
        is_due = run.checkpointer.is_due(iteration)
        is_last = iteration == settings.train_iters or should_exit(iteration, settings.exit_interval)
        blocked_s = _save(run, is_last=is_last) if is_due or is_last else 0.0
        if is_last:
            return
    _save(run, is_last=True)


def _iterate(run: Run) -> StepResult:
    state, settings = run.state, run.config.train
    progress = state.progress
    iteration = progress.iteration + 1
    micro_batches = run.train.shuffled(progress.consumed_samples, settings.seed)
    keys = [
        dropout_key(settings.seed, iteration, dp=run.train.dp_rank, micro_batch=number)
        for number in range(len(micro_batches))
    ]
    lr = run.schedule.at(iteration)
    result = train_step(
        state,
        micro_batches,
        keys=keys,
        lr=lr,
        clip_grad=settings.clip_grad,
        axes=run.axes,
        cluster=run.cluster,
    )
    samples = settings.global_batch_size
    state.progress = progress.after_iteration(samples, samples * settings.seq_length)
    return result


def _record(run: Run, result: StepResult, *, seconds: float, blocked_s: float) -> None:
    progress = run.state.progress
    if run.log is not None:
        run.log.iteration(
            IterationRecord(
                iteration=progress.iteration,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=run.schedule.at(progress.iteration),
                consumed_samples=progress.consumed_samples,
                tokens=run.config.train.global_batch_size * run.config.train.seq_length,
                seconds=seconds,
                checkpoint_seconds=blocked_s,
            )
        )


def _evaluate(run: Run) -> None:
    assert run.valid is not None
    batches = run.valid.in_order(run.config.train.eval_iters)
    loss = evaluate(run.state, batches, axes=run.axes, cluster=run.cluster)
    run.state.progress = run.state.progress.after_evaluation(loss)
    if run.log is not None:
        run.log.evaluation(run.state.progress.iteration, loss, run.state.progress.best_loss)


def _save(run: Run, *, is_last: bool) -> float:
    """Save the state as it stands; return the seconds that took of the training."""
    check_tied_copies(run.state, run.axes.ends)
    start = time.perf_counter()
    progress = run.state.progress
    if run.log is not None:
        run.log.sync()
    documents = {
        "config.json": models.hf_config(run.config.model),
        "generation_config.json": models.generation_config(run.config.model),
        "trainer_state.json": record.state_record(progress, run.schedule.at(progress.iteration), run.description),
    }
    contents = run.state.contents(documents, with_optimizer=not run.config.checkpoint.no_save_optim)
    report = run.checkpointer.save(progress.iteration, contents)
    if report is not None and report.error is None and run.log is not None:
        run.log.save(report)
    if is_last and report is not None and report.error is not None:
        raise report.error
    return time.perf_counter() - start
