"""Runs the training command: composes and checks the configuration, joins the ranks, trains, and explains failures."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import ConfigError, LaunchError, LockError
from reprise.storage import FILE_SYSTEM
from trainer.config.checks import validate
from trainer.config.compose import Resolved, read_command, resolve_command, unlike
from trainer.config.schema import Config
from trainer.launch.environment import Environment
from trainer.launch.exit_with_error import exit_with_error
from trainer.launch.start_times import StartTimes, importing
from trainer.launch.torch_library import load_torch_library
from trainer.metrics.line_handler import LineHandler

if TYPE_CHECKING:
    from trainer.launch.control import RunControl
    from trainer.launch.process_group import Cluster
    from trainer.launch.signals import SignalHandler
    from trainer.metrics.run_log import RunLog
    from trainer.run.build import Run
    from trainer.run.inputs import RunInputs
    from trainer.training.rewind import Rewind

_log = logging.getLogger(__name__)
_EXIT_GRACE_S = 1.0
# How long a failing rank waits at most for a hung store host or disk.
_LEAVE_WITHIN_S = 40.0
_MOST_REASON = 400  # how much of an error's text the launch log keeps


def main(arguments: Sequence[str] | None, times: StartTimes) -> int:
    """Train with the configuration on the command line and return 0. On failure, exit with status 1 and one paragraph.

    Args:
        arguments: The words after `reprise train`. None reads the process's, after `python -m trainer`.
        times: This start's times.
    """
    environment = None
    try:
        environment = Environment.read(os.environ)
        with importing():
            command = read_command(sys.argv[1:] if arguments is None else arguments)
        if command is not None:
            load_torch_library()
            _start_log(environment.rank)
            with importing():
                resolved = resolve_command(command, FILE_SYSTEM)
            if resolved.config.train.dry_run:
                _dry_run(resolved.config, environment.world_size)
            else:
                run(resolved, environment, times)
    except SystemExit:  # argparse has printed the reason
        raise
    except BaseException as error:  # noqa: BLE001 - printed, and passed on as the exit status
        exit_with_error(error, environment)
    return 0


def _start_log(rank: int) -> None:
    """Log to stdout on rank 0. Other ranks log errors to stderr."""
    level, stream, form = logging.INFO, sys.stdout, "%(message)s"
    if rank:
        level, stream, form = logging.ERROR, sys.stderr, f"rank {rank}: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[LineHandler(stream)], force=True)


def run(resolved: Resolved, environment: Environment, times: StartTimes) -> None:
    """Check a configuration, then train. Call on all ranks.

    Raises:
        TrainerError: The run cannot start.
    """
    config = validate(resolved.config, environment.world_size)
    if config is not resolved.config:
        _log.info(f"train.micro_batch_size=auto: {config.train.micro_batch_size}")
        resolved = replace(resolved, config=config)
    _import_training(config, environment.world_size)
    times.end("imports")
    from trainer.launch import process_group as launch
    from trainer.launch.hangs import FOLDER as HANGS
    from trainer.launch.signals import SignalHandler
    from trainer.launch.watchdog import Watchdog
    from trainer.memory.needs import out_of_memory

    train = config.train
    timeout_s = 60 * train.distributed_timeout_minutes
    cluster = launch.start(train.device, deterministic=train.deterministic, threads=train.threads, timeout_s=timeout_s)
    lanes = config.parallel.invariant_ranks
    if lanes and not train.threads and cluster.device.type == "cpu":
        _log.info(
            f"train.threads is 0, so each rank uses its share of the host's cores: parallel.invariant_ranks={lanes} "
            "keeps the bits only between launches with the same thread count"
        )
    report_channel = cluster.channel.clone(_EXIT_GRACE_S)
    signals = SignalHandler(report_channel.fail)
    watchdog = Watchdog(
        cluster.channel.clone(timeout_s),
        timeout_s,
        activity=cluster.activity,
        hangs=Path(config.run.dir) / HANGS,
    )
    signals.start()
    watchdog.start()
    try:
        _train(resolved, cluster, signals, times)
        launch.final_barrier(cluster)
    except BaseException as error:
        signals.leave_within(_LEAVE_WITHIN_S)
        error = out_of_memory(error, config, where=f"rank {cluster.rank}, {cluster.device}") or error
        cause = watchdog.explain(error, cluster.channel)
        if cause is not None:
            failure = LaunchError(cause.rstrip("."))
            failure.is_echo = True
            raise failure from error
        raise error
    watchdog.stop()
    launch.destroy(cluster)
    signals.stop()


def _import_training(config: Config, world_size: int) -> None:
    """Import everything a run needs before the ranks join. Other modules are imported on first use.

    Torch's modules for a parallel axis take 0.3 to 0.9 s each, so each run imports only its own.
    """
    topology = config.parallel.topology(world_size)
    names = ["trainer.launch.watchdog", "trainer.start.fill", "trainer.training.loop"]
    if topology.dp > 1 and config.parallel.zero_stage > 0:
        names += ["torch.distributed.fsdp", "torch._dynamo"]  # creating a DTensor imports torch._dynamo
    if topology.tp > 1:
        names += ["trainer.parallel.tensor", "torch._dynamo"]
    if topology.pp > 1:
        names.append("torch.distributed.pipelining")
    with importing():
        for name in names:
            import_module(name)


def _train(resolved: Resolved, cluster: Cluster, signals: SignalHandler, times: StartTimes) -> None:
    from trainer.launch.control import RunControl
    from trainer.launch.run_folder import hold_run_folder
    from trainer.run.inputs import open_inputs

    config, channel = resolved.config, cluster.channel
    first = channel.from_first("config", lambda: resolved.text)
    with channel.agreed("config/same"):
        if resolved.text != first:
            raise unlike(resolved.text, first, rank=cluster.rank)
    times.end("rendezvous")
    inputs = open_inputs(config, cluster)
    times.end("data")
    checkpoints = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    control = RunControl(config, signals, rank=cluster.rank)
    with hold_run_folder(Path(config.run.dir), checkpoints, channel, cluster.nonce):
        rewind: Rewind | None = None
        while (rewind := _train_from(resolved, config, cluster, inputs, control, times, rewind)) is not None:
            gc.collect()  # modules and their hooks form cycles, and hold memory needed by the next start
            nonce = channel.from_first(f"rewind/{cluster.nonce}", lambda: secrets.token_hex(4))
            cluster, config, times = replace(cluster, nonce=nonce), rewind.config(config), StartTimes()


def _train_from(
    resolved: Resolved,
    config: Config,
    cluster: Cluster,
    inputs: RunInputs,
    control: RunControl,
    times: StartTimes,
    rewind: Rewind | None,
) -> Rewind | None:
    """Start and train. Return the rewind with which to start again, or None.

    Args:
        rewind: The rewind leading to this start. None for the first start.
    """
    from trainer.metrics.launch_log import LaunchOutcome
    from trainer.run.build import build
    from trainer.saves.targets import build_saves
    from trainer.start.decide import decide
    from trainer.start.fill import fill
    from trainer.training.loop import train

    next_rewind: Rewind | None = None
    with ExitStack() as stack:
        saves = stack.enter_context(build_saves(config, cluster))
        start = decide(config, cluster, saves)
        times.end("load")
        run = build(config, cluster, inputs=inputs, saves=saves, environment_keys=resolved.environment_keys)
        run.control, run.start_times = control, times
        times.end("build")
        fill(run, start)
        if config.checkpoint.mirror is not None:
            from trainer.saves.mirror import mirrored

            is_stopped, is_rewound = run.control.is_signalled, lambda: next_rewind is not None
            mirror = mirrored(config.checkpoint, cluster, is_stopped=is_stopped, is_rewound=is_rewound)
            run.mirrors = stack.enter_context(mirror)
        run.logs = stack.enter_context(_logged(run, resolved.text))
        times.end("load")
        if rewind is not None:
            rewind.begin(run)
        next_rewind = train(run)
        if next_rewind is not None:
            for log in run.logs:
                log.ended(run.state.progress.iteration, LaunchOutcome.rewound, f"because of {next_rewind.spike}")
        return next_rewind


@contextmanager
def _logged(run: Run, config_text: str) -> Iterator[tuple[RunLog, ...]]:
    """Yield the open log for a filled run on rank 0, and close it at the end, unless an error ends the run."""
    from trainer.metrics.launch_log import LaunchOutcome
    from trainer.run.build import build_log, launch_record

    if run.cluster.rank != 0:
        yield ()
        return
    log, progress = build_log(run), run.state.progress
    try:
        log.open(
            progress.iteration,
            config_text,
            owes_evaluation=progress.owes_evaluation,
            age_s=run.start_times.age_s(),
            launch=run.cluster.nonce if progress.iteration < run.train_iters else "",
            description=launch_record(run),
        )
        yield (log,)
    except BaseException as error:
        if not isinstance(error, LockError):  # then the folder belongs to another job
            log.ended(run.state.progress.iteration, LaunchOutcome.failed, repr(error)[:_MOST_REASON])
        raise
    iteration = run.state.progress.iteration
    is_finished = iteration >= run.train_iters
    outcome = LaunchOutcome.finished if is_finished else LaunchOutcome.stopped
    log.ended(iteration, outcome, "" if is_finished else run.control.reason(iteration))
    log.close()


def _dry_run(config: Config, world_size: int) -> None:
    """Print the memory needed per rank, for a launch with `train.dry_run_ranks` ranks."""
    if world_size > 1:
        raise ConfigError("A dry run uses one process", found=f"{world_size} ranks", fix="Start it without torchrun.")
    config = validate(config, config.train.dry_run_ranks)
    from trainer.memory.dry_run import report

    print(report(config, config.train.dry_run_ranks))
