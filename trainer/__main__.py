"""The command: `python -m trainer KEY=VALUE ...`, or `torchrun --nproc-per-node N -m trainer KEY=VALUE ...`.

Hydra is used here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.bar import line_handler
from trainer.config import Config
from trainer.config_checks import validate
from trainer.errors import ConfigError, LaunchError, TrainerError

if TYPE_CHECKING:
    from trainer.launch import Cluster
    from trainer.signals import SignalWatch

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

_FAREWELL_S = 1.0
# A rank that fails may wait for a store whose host hangs, or for a disk: not longer than this.
_LAST_WORDS_S = 40.0

ConfigStore.instance().store(name="schema", node=Config)


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def main(raw: DictConfig) -> None:
    """Train as configured; exit with status 1 and one paragraph if that cannot be."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.ERROR,
        format="%(message)s" if rank == 0 else f"rank {rank}: %(message)s",
        handlers=[line_handler(sys.stdout if rank == 0 else sys.stderr)],
        force=True,
    )
    try:
        run(raw)
    except BaseException as error:  # noqa: BLE001 - told and handed on as the exit status
        if isinstance(error, TrainerError):
            prefix = "" if rank == 0 else f"rank {rank}: "
            print(f"{prefix}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        # Not sys.exit: a peer may wait in a collective that this rank will never join, and torch would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def run(raw: DictConfig) -> None:
    """Resolve and check the configuration, then train. A call of all ranks.

    Raises:
        TrainerError: if the run cannot start.
    """
    _refuse_clocks(raw)
    resolved = OmegaConf.to_yaml(raw, resolve=True)
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.train.dry_run:
        _dry_run(config, world_size)
        return
    validate(config, world_size)
    from trainer import launch
    from trainer.peers import PeerWatch
    from trainer.signals import SignalWatch

    timeout_s = 60 * config.train.distributed_timeout_minutes
    cluster = launch.start(config.train.device, deterministic=config.train.deterministic, timeout_s=timeout_s)
    farewell = cluster.board.clone(_FAREWELL_S)
    watch = SignalWatch(config.train.exit_signal_save_seconds, farewell=farewell.fail)
    peers = PeerWatch(cluster.board.clone(timeout_s), timeout_s, store_host=cluster.store_host)
    watch.start()
    peers.start()
    try:
        _train(config, resolved, cluster, watch)
        launch.part(cluster)
    except BaseException as error:
        watch.leave_within(_LAST_WORDS_S, 1)
        cause = peers.explain(error, cluster.board)
        if cause is not None:
            raise LaunchError(cause.rstrip(".")) from error
        raise
    peers.stop()
    launch.leave(cluster)
    watch.stop()


def compose(overrides: Sequence[str]) -> Config:
    """Return the configuration that the command makes of these overrides, unchecked.

    Raises:
        ConfigError: for an override that is none, or of a key that is not there.
    """
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = OmegaConf.to_object(hydra.compose("train", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("The configuration cannot be composed", found=_told(error)) from error
    assert isinstance(config, Config)
    return config


def _told(error: BaseException) -> str:
    """Return what Hydra says, and what was wrong below it: of a value that does not fit it says only where."""
    below = error.__cause__
    said = str(error).strip()
    return said if below is None else f"{said}: {str(below).strip().splitlines()[0]}"


def _train(config: Config, resolved: str, cluster: Cluster, watch: SignalWatch) -> None:
    from trainer.build import build
    from trainer.loop import train
    from trainer.restore import restore

    expected = cluster.board.from_rank0("config", resolved.encode()).decode()
    is_same = expected == resolved
    problem = None if is_same else ConfigError("The configuration differs from rank 0's", where=f"rank {cluster.rank}")
    cluster.board.agree("config", problem)
    built = build(config, cluster, watch)
    try:
        restore(built)
        if built.log is not None:
            progress = built.state.progress
            built.log.open(progress.iteration, resolved, owes_evaluation=progress.owes_evaluation)
        train(built)
    except BaseException:
        if built.log is not None:
            built.log.close_bar()
        built.checkpointer.abandon()
        raise
    built.checkpointer.close()
    if built.log is not None:
        built.log.close()


def _dry_run(config: Config, world_size: int) -> None:
    """Print what a launch of `train.dry_run_ranks` ranks would put on each."""
    if world_size > 1:
        raise ConfigError("A dry run is one process", found=f"{world_size} ranks", fix="Start it without torchrun.")
    validate(config, config.train.dry_run_ranks)
    from trainer.dry_run import report

    print(report(config, config.train.dry_run_ranks))


def _refuse_clocks(raw: DictConfig) -> None:
    """Refuse a run folder named by the clock: ranks would disagree on it, and a resume would never find it again."""
    section = OmegaConf.to_container(raw.run, resolve=False)
    assert isinstance(section, dict)
    for key, value in section.items():
        if "${now" in str(value):
            raise ConfigError(
                "A run's name or folder depends on the time",
                where=f"run.{key!s}",
                found=str(value),
                fix="Give it a fixed name, so that the same command resumes it.",
            )


if __name__ == "__main__":
    main()
