"""Training: `reprise train KEY=VALUE ...`, or `torchrun --nproc-per-node N -m trainer KEY=VALUE ...` on several ranks.

This is the only module that uses Hydra.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.checks import loose_threads, unused_keys, validate
from trainer.config.schema import Config, topology_of
from trainer.config.values import from_environment, path_problems
from trainer.errors import ConfigError, LaunchError, TrainerError
from trainer.launch import streams
from trainer.launch.environment import Environment
from trainer.launch.start_times import Phase, StartTimes, importing
from trainer.memory_needs import require_host_memory, require_memory
from trainer.metrics.progress_bar import line_handler

if TYPE_CHECKING:
    from trainer.build import Run
    from trainer.launch.process_group import Cluster
    from trainer.launch.signals import SignalHandler

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

_EXIT_GRACE_S = 1.0
# The longest time that a failing rank waits for a hung store host or a disk.
_LEAVE_WITHIN_S = 40.0

# Lines of Hydra's errors to omit: no key can be appended, and Hydra's folders do not concern the user.
_LEFT_OUT = ("reference_type", "object_type", "To append to your config", "Config search path:", "provider=")

ConfigStore.instance().store(name="schema", node=Config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line configures it and return 0; exit with status 1 and one paragraph if that cannot be.

    Args:
        arguments: the words after `reprise train`; None reads those of the process, after `python -m trainer`.
    """
    if arguments is not None:
        sys.argv = ["reprise train", *arguments]  # which Hydra reads
    closed, rank = streams.replace_closed(), 0
    try:
        environment = Environment.read(os.environ)
        rank = environment.rank
        with importing():
            raw = _composed_command()
        if raw is not None:
            _start_log(rank, is_silent="stdout" in closed)
            run(_over_saved(raw), environment)
    except SystemExit:  # argparse has printed the reason
        raise
    except BaseException as error:  # noqa: BLE001 - printed, and passed on as the exit status
        if isinstance(error, TrainerError):
            prefix = "" if rank == 0 else f"rank {rank}: "
            print(f"{prefix}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        # Not sys.exit: a peer may wait in a collective that this rank will never join, and torch would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    return 0


def _start_log(rank: int, *, is_silent: bool) -> None:
    """Log to stdout on rank 0, or only warnings to stderr if stdout is closed; other ranks log errors to stderr."""
    if rank == 0 and not is_silent:
        level, handler = logging.INFO, line_handler(sys.stdout)
    else:
        level, handler = logging.WARNING if rank == 0 else logging.ERROR, line_handler(sys.stderr)
    form = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[handler], force=True)


def run(raw: DictConfig, environment: Environment) -> None:
    """Check a composed configuration, then train. A call of all ranks.

    Raises:
        TrainerError: if the run cannot start.
    """
    config, resolved = _resolved(raw)
    environment_keys = from_environment(OmegaConf.to_container(raw, resolve=False))
    if config.train.dry_run:
        _dry_run(config, environment.world_size)
        return
    if not path_problems(config):
        streams.keep_errors_in(Path(config.run.dir))
    validate(config, environment.world_size)
    require_host_memory(config, environment.world_size, environment.local_world_size)
    for line in [*unused_keys(config), *loose_threads(config)]:
        _log.info(line)
    times = StartTimes.of_process()
    _import_training(config, environment.world_size)
    times.end(Phase.imports)
    from trainer.launch import process_group as launch
    from trainer.launch.signals import SignalHandler
    from trainer.launch.watchdog import Watchdog

    train = config.train
    timeout_s = 60 * train.distributed_timeout_minutes
    cluster = launch.start(train.device, deterministic=train.deterministic, threads=train.threads, timeout_s=timeout_s)
    report_channel = cluster.channel.clone(_EXIT_GRACE_S)
    signals = SignalHandler(config.train.exit_signal_save_seconds, report=report_channel.fail)
    watchdog = Watchdog(cluster.channel.clone(timeout_s), timeout_s, store_host=cluster.store_host)
    signals.start()
    watchdog.start()
    if environment.is_torchrun and not cluster.launch.is_restarted:
        times.add_torchrun()
    try:
        _train(config, resolved, environment_keys, cluster, signals, times)
        launch.final_barrier(cluster)
    except BaseException as error:
        signals.leave_within(_LEAVE_WITHIN_S, 1)
        cause = watchdog.explain(error, cluster.channel)
        if cause is not None:
            raise LaunchError(cause.rstrip(".")) from error
        raise
    watchdog.stop()
    launch.destroy(cluster)
    signals.stop()


def _import_training(config: Config, world_size: int) -> None:
    """Import all that a run needs, before the ranks join."""
    with importing():
        for name in ("trainer.launch.watchdog", "trainer.restore", "trainer.loop"):
            import_module(name)
        from trainer.parallel.imports import import_axes

        import_axes(topology_of(config, world_size), zero_stage=config.parallel.zero_stage)


def compose(overrides: Sequence[str]) -> Config:
    """Return the configuration composed from these overrides, without validation.

    Raises:
        ConfigError: for an override that cannot be parsed, an unknown key, or a value that cannot be resolved.
    """
    return _resolved(_composed(overrides))[0]


def _composed(overrides: Sequence[str]) -> DictConfig:
    _refuse_hydra_keys(overrides)

    def composed() -> DictConfig:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose("train", overrides=list(overrides))

    return _reported(composed, overrides)


def _composed_command() -> DictConfig | None:
    """Return the configuration composed from the command line; None if Hydra only printed it (`--cfg`, `--help`)."""
    arguments = get_args_parser().parse_args()
    if sys.argv[1:] == arguments.overrides:  # no option of Hydra, whose command would compose twice, to know its mode
        return _composed(arguments.overrides)
    if arguments.multirun or arguments.experimental_rerun is not None:
        raise ConfigError(
            "A command runs one configuration",
            found="--multirun" if arguments.multirun else "--experimental-rerun",
            fix="Start one command per configuration, each with its own run.name.",
        )
    _refuse_hydra_keys(arguments.overrides)
    found: list[DictConfig] = []
    command = hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(found.append)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        _reported(command, arguments.overrides)
    except BrokenPipeError:  # the reader of `--help` has seen enough
        sys.stdout = None
    return found[0] if found else None


def _over_saved(raw: DictConfig) -> DictConfig:
    """Return the configuration of a command that loads a checkpoint and names no model, over the checkpoint's own.

    Keys that the command sets keep its values, and so do sections whose group it names.
    """
    _refuse_unknown_keys(raw)
    arguments, section = get_args_parser().parse_args(), raw.checkpoint
    named = {override.key_or_group for override in OverridesParser.create().parse_overrides(arguments.overrides)}
    load, step, own = _reported(lambda: (str(section.load), section.ckpt_step, section.save), arguments.overrides)
    is_whole = arguments.config_name or arguments.config_path or named & {"model", "experiment"}
    if load in ("auto", "none") or is_whole:
        return raw
    from trainer.config.load_saved import find_saved

    saved = find_saved(Path(load), iteration=step, own=None if own is None else Path(own))
    if saved is None:
        return raw
    taken = {key: value for key, value in saved.values.items() if not _is_named(key, named)}

    def update() -> None:
        for key, value in taken.items():
            # A nested section of the schema takes members only; a dict in its place would be of another type.
            is_section = isinstance(value, dict) and OmegaConf.select(raw, key) is not None
            OmegaConf.update(raw, key, value, merge=is_section)

    _reported(update, [str(saved.path)])
    _log.info(f"the configuration is that of {saved.path}, under the keys of the command")
    return raw


def _is_named(key: str, named: Collection[str]) -> bool:
    """Return whether a command names a key, the mapping that it is in, or one of its members."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in named)


def _reported(call: Callable[[], _T], overrides: Sequence[str]) -> _T:
    """Call Hydra or OmegaConf, and convert their errors to a ConfigError.

    Their own error classes name the override; assertions and ValueErrors from their dependencies do not.
    """
    try:
        return call()
    except (HydraException, OmegaConfBaseException) as error:
        said = _error_text(error)
        fix = "Give one value per key; there is no multirun." if "--multirun" in said else None
        raise ConfigError("The configuration cannot be composed", found=said, fix=fix) from error
    except BrokenPipeError:
        raise
    except Exception as error:
        where = " ".join(overrides) or None
        raise ConfigError("The configuration cannot be composed", where=where, found=_error_text(error)) from error


def _refuse_hydra_keys(overrides: Sequence[str]) -> None:
    for override in overrides:
        if re.match(r"[+~]*hydra[./@=]", override) and not re.match(r"\+*hydra\.(searchpath|verbose)=", override):
            raise ConfigError(
                "Hydra's own keys cannot be set",
                found=override,
                fix="Remove it; run.dir sets the folder of a run.",
            )


def _resolved(raw: DictConfig) -> tuple[Config, str]:
    """Return the configuration and its YAML text, with every interpolation resolved."""
    _refuse_unknown_keys(raw)
    _refuse_clocks(raw)

    def resolve() -> tuple[object, str]:
        return OmegaConf.to_object(raw), OmegaConf.to_yaml(raw, resolve=True)

    config, text = _reported(resolve, ())
    assert isinstance(config, Config)
    return config, text


def _refuse_unknown_keys(raw: DictConfig) -> None:
    """Refuse unknown keys, which `+KEY=VALUE` adds, and missing sections, which `~KEY` removes."""
    added = list(_unknown_keys(raw))
    removed = [field.name for field in fields(Config) if field.name not in raw]
    if added or removed:
        raise ConfigError(
            "The configuration has unknown or missing keys",
            found="; ".join([*(f"{key} is unknown" for key in added), *(f"{key} is removed" for key in removed)]),
            fix="Correct the key; `--cfg job` shows all keys.",
        )


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    known = {field.name for field in fields(OmegaConf.get_type(node))}  # type: ignore[arg-type]
    for key in node:
        name = f"{prefix}{key!s}"
        if key not in known:
            yield name
            continue
        is_set = not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key))
        if is_set and isinstance(member := node[key], DictConfig):
            yield from _unknown_keys(member, f"{name}.")


def _error_text(error: BaseException) -> str:
    """Return Hydra's message and its cause in one line; for a value, Hydra's message names only the key."""
    below = error.__cause__
    said = _one_line(str(error)) or type(error).__name__
    return said if below is None else f"{said.removesuffix('.')}: {_one_line(str(below))}"


def _one_line(text: str) -> str:
    lines = [re.sub(r"^full_key: (.*)", r"(\1)", line.strip()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_LEFT_OUT))


def _train(
    config: Config,
    resolved: str,
    environment_keys: Collection[str],
    cluster: Cluster,
    signals: SignalHandler,
    times: StartTimes,
) -> None:
    from trainer.build import build
    from trainer.config.saved import without_keys
    from trainer.launch.device import CPU, memory_bytes
    from trainer.launch.run_folder import hold_run_folder

    expected = cluster.channel.broadcast("config", resolved.encode()).decode()
    is_same = expected == resolved
    problem = None if is_same else ConfigError("The configuration differs from rank 0's", where=f"rank {cluster.rank}")
    cluster.channel.agree("config", problem)
    times.end(Phase.rendezvous)
    if cluster.device.type != CPU:
        total_bytes = memory_bytes(cluster.device)
        where = str(cluster.device)
        require_memory(config, cluster.world_size, ranks=1, available_bytes=total_bytes, where=where, is_host=False)
    built = build(config, cluster, signals, times)
    built.saved_config = without_keys(built.saved_config, environment_keys)
    times.end(Phase.build)
    checkpoints = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    with hold_run_folder(Path(config.run.dir), checkpoints, cluster.channel, cluster.nonce):
        _train_built(built, resolved)


def _train_built(built: Run, resolved: str) -> None:
    from trainer.loop import train
    from trainer.restore import restore

    try:
        began_elsewhere = restore(built)
        if built.log is not None:
            progress, built.log.train_iters = built.state.progress, built.train_iters
            built.log.open(
                progress.iteration,
                resolved,
                owes_evaluation=progress.owes_evaluation,
                began_elsewhere=began_elsewhere,
            )
        built.start_times.end(Phase.load)
        train(built)
    except BaseException:
        if built.log is not None:
            built.log.close_bar()
        for saver in built.all_savers:
            saver.abandon()
        raise
    built.checkpointer.close()
    if built.weights is not None:
        built.weights.close()
    if built.local is not None:
        built.local.close()
    if built.log is not None:
        built.log.close()


def _dry_run(config: Config, world_size: int) -> None:
    """Print the memory that each rank of a launch of `train.dry_run_ranks` ranks needs."""
    if world_size > 1:
        raise ConfigError("A dry run is one process", found=f"{world_size} ranks", fix="Start it without torchrun.")
    validate(config, config.train.dry_run_ranks)
    from trainer.dry_run import report

    print(report(config, config.train.dry_run_ranks))


def _refuse_clocks(raw: DictConfig) -> None:
    """Refuse a run folder whose name depends on the time: ranks would disagree, and no resume would find it."""
    section = OmegaConf.to_container(raw.run, resolve=False)
    assert isinstance(section, dict)
    for key, value in section.items():
        if "${now" in str(value):
            raise ConfigError(
                "The name or folder of a run depends on the time",
                where=f"run.{key!s}",
                found=str(value),
                fix="Set a fixed name, so that the same command resumes the run.",
            )


if __name__ == "__main__":
    main()
