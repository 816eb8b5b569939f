"""Decides on a run's source: its own newest checkpoint, the command's checkpoint, other weights, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.format import FRESH, Journal
from reprise.loading import LoadSource
from reprise.storage import CheckpointFolder, Json
from reprise.stores import files_of, is_stored, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import batch_problems
from trainer.config.overrides import text_value
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.launch.relaunch import Launch
from trainer.saves.targets import Saves
from trainer.start.identity import began_anew, find_journal, saved_lineages
from trainer.start.source import Checkpoints, InitialValues, TensorSource, Weights, found_patiently, named_source

_log = logging.getLogger(__name__)


class Origin(Enum):
    """Where a run starts, or continues from."""

    initial = auto()  # initial values, or initial adapters on a separately loaded base
    named = auto()  # what `checkpoint.load` names
    newest = auto()  # its own newest checkpoint, as its command says
    own = auto()  # the same, although its command names another start


@dataclass(frozen=True, slots=True)
class Start:
    """A start's source and circumstances, the same on all ranks.

    Args:
        source: The tensors' source.
        section: Settings for the load. The keys for a new start (`ckpt_step`, `finetune`, `no_load_optim`) do not apply
            if a run resumes from its own checkpoint although its command names its first source. With `no_save_optim`,
            its own checkpoints have no optimizer state, and `no_load_optim` applies.
        journal: The run's journal so far.
        is_own: Whether the source is the run's own newest checkpoint.
        keeps_weights: Whether earlier weights-only saves belong to this run.
        with_optimizer: Whether a checkpoint's optimizer state is loaded as well.
    """

    source: TensorSource
    section: CheckpointSection
    journal: Journal
    is_own: bool
    keeps_weights: bool
    with_optimizer: bool = False


def decide(config: Config, cluster: Cluster, saves: Saves) -> Start:
    """Decide on a run's source, as rank 0 sees it, and take the locks for its save folders. Collective.

    Raises:
        TrainerError: The run cannot start this way. Every rank raises.
    """
    journal, section = saves.start(lambda: find_journal(config, cluster, saves)), config.checkpoint
    find = partial(_find, config, saves, journal, cluster.launch)
    answer: Json = cluster.channel.from_first("start", lambda: found_patiently(find, "checkpoint.load"))
    origin, choice = Origin[answer["origin"]], answer["source"]
    is_own = origin in (Origin.own, Origin.newest)
    if origin is Origin.own:
        no_load_optim = section.no_load_optim and section.no_save_optim
        section = replace(section, finetune=False, no_load_optim=no_load_optim, ckpt_step=None)
    if choice.get("kind") == "checkpoint":
        source = LoadSource(location(choice["path"]), section.ckpt_step, terms.LOAD)
        if is_own:  # the hosts' local checkpoints are candidates as well
            source = replace(source, lineage=journal.lineage, local=saves.host_folders)
        keeps_weights = not section.finetune and (is_own or answer["is_inside"])
        return Start(Checkpoints(source), section, journal, is_own, keeps_weights, not section.loads_weights_alone)
    require_batches(config, cluster.world_size, 0)
    weights: TensorSource = Weights(Path(choice["path"])) if choice else InitialValues()
    return Start(weights, section, journal, is_own=False, keeps_weights=False)


def require_batches(config: Config, world_size: int, consumed_samples: int) -> None:
    """Refuse global batch sizes, from a position on, if the ranks cannot divide them.

    Raises:
        MismatchError: There are such sizes. The message lists them, and every rank raises.
    """
    problems = [*batch_problems(config, world_size, consumed_samples)]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise MismatchError(f"The run cannot continue from sample {consumed_samples}:\n{lines}\nNothing was trained")


def _find(config: Config, saves: Saves, journal: Journal, launch: Launch) -> Json:
    """Return a start's origin, its source's kind and path, and whether this lies in the run's folder. Rank 0 only."""
    section, is_inside = config.checkpoint, False
    is_restarted = section.is_directed and not set(launch.earlier).isdisjoint(journal.lineage.launch)
    if section.load not in ("auto", "none") and not is_restarted:
        named = location(section.load)
        if not is_stored(named):  # a run with its own checkpoints continues while the store is unreachable
            named = LoadSource.named(named).path
        folder = section.folder
        is_inside = folder is not None and folder.resolve() in (named.resolve(), *named.resolve().parents)
    committed, source = _committed(section, saves, journal), {}
    origin, line = choose(journal, committed, config, is_inside=is_inside, is_restarted=is_restarted)
    is_own = origin in (Origin.own, Origin.newest)
    # A run with branches may have lost its records. Begun anew on command, it leaves earlier checkpoints in the mirror.
    starts_over = section.load == "auto" and not began_anew(journal.lineage)
    if not is_own and (starts_over or not journal.lineage.branches):
        _refuse_mirror(section)
    if line:
        _log.log(logging.INFO if is_own else logging.WARNING, line)
    if is_own:
        source = {"kind": "checkpoint", "path": str(section.folder)}
    elif origin is Origin.named:
        source = named_source(location(section.load), with_weights=not config.model.is_adapted)
    return {"origin": origin.name, "source": source, "is_inside": is_inside}


def _committed(section: CheckpointSection, saves: Saves, journal: Journal) -> list[int]:
    """Return the iterations from which a start could resume, or that `checkpoint.load=none` sets aside."""
    if section.load == "none":  # hosts delete what they set aside
        return [] if saves.shared is None else saves.shared.committed()
    committed, lineage = saves.iterations(), journal.lineage
    if saves.shared is None or journal.saved != FRESH:
        return committed
    # A start that began the run anew may have been killed before it set these aside.
    branches = saved_lineages(saves.shared)
    given_up = {n for n, saved in branches if saved.run == lineage.run and not lineage.admits(saved, n)}
    return [number for number in committed if number not in given_up]


def choose(
    journal: Journal, committed: Collection[int], config: Config, *, is_inside: bool, is_restarted: bool
) -> tuple[Origin, str]:
    """Return where a run starts, or continues from, and a log line, empty for none. Pure.

    A path in `checkpoint.load` outside the run's own folder is the run's start. With `finetune`, so is a path inside
    it, such as imported weights. Once the run has its own checkpoint (beyond iteration 0 in the second case), the same
    command resumes from it. A launch restarted by its launcher after a committed checkpoint resumes from it with any
    command.

    Args:
        committed: The run's committed iterations.
        is_inside: Whether the path in `checkpoint.load` lies in the run's own folder.
        is_restarted: Whether the launcher restarted this launch after it saved.

    Raises:
        CheckpointError: The run's checkpoints are missing.
    """
    section = config.checkpoint
    if is_restarted:
        return Origin.own, "this launch was restarted: it resumes from its own newest checkpoint"
    if section.load == "none":
        return Origin.initial, _set_aside(committed, config)
    if section.load != "auto":
        if section.finetune and any(committed) if is_inside else committed:
            return Origin.own, f"this run began at {section.load} and resumes from its own checkpoints"
        return Origin.initial if config.model.is_adapted and section.base is None else Origin.named, ""
    if committed:
        return Origin.newest, ""
    if section.ckpt_step is not None:
        raise CheckpointError(
            "The requested iteration was never saved",
            where=section.save or "checkpoint.save=null",
            expected=f"iteration {section.ckpt_step}",
            found="no checkpoint",
            fix="Correct checkpoint.ckpt_step.",
        )
    if journal.saved != FRESH:
        url = section.mirror
        mirror = f"continue from the mirror with checkpoint.load={url} and another checkpoint.mirror, " if url else ""
        raise CheckpointError(
            "This run has recorded saves but no checkpoint is there",
            where=Path(config.run.dir),
            expected=f"a checkpoint in {section.save}" if section.save else "a checkpoint, but checkpoint.save is null",
            found=f"iteration {journal.saved} as the last, and no iter_ folder",
            fix=f"Mount or restore the checkpoints, {mirror}or start over with checkpoint.load=none.",
        )
    return Origin.initial, "this run has saved nothing: it starts over" if journal.lineage.branches else ""


def _set_aside(committed: Collection[int], config: Config) -> str:
    """Describe what `checkpoint.load=none` does to the run's checkpoints. Empty without checkpoints."""
    if not committed:
        return ""
    return (
        f"checkpoint.load=none sets aside {count_of(len(committed), 'checkpoint')} of this run, the newest of "
        f"iteration {max(committed)}: they become iter_*.superseded-*. To leave them as they are, stop and start "
        f"another run: run.name={text_value(config.run.name + '-2')}"
    )


def _refuse_mirror(section: CheckpointSection) -> None:
    """Refuse a new run whose mirror has checkpoints: its folder is lost, or they belong to another run.

    An unreachable store is only logged.
    """
    if section.mirror is None:
        return
    path = location(section.mirror)
    files = files_of(path)
    try:
        committed = CheckpointFolder(path, files).committed()
    except OSError as error:
        _log.warning("%s cannot be read, so it is unknown whether it has checkpoints: %s", path, error.strerror)
        return
    finally:
        files.end()
    if committed:
        raise CheckpointError(
            "The mirror has checkpoints, but this run has none to continue from",
            where=path,
            expected=f"a checkpoint in {section.folder}, or an empty mirror",
            found=f"iteration {max(committed)} in the mirror",
            fix="Set another checkpoint.mirror: each run needs its own URL. To continue from these checkpoints, also "
            f"set checkpoint.load={section.mirror}.",
        )
