"""Decides on the source of a run: its own newest checkpoint, the command's checkpoint, other weights, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, MismatchError
from reprise.format import ADAPTERS, FRESH, MANIFEST, Lineage
from reprise.loading import LoadSource
from reprise.storage import TRACKER, CheckpointFolder, Json, Patience, exists, failed_read, is_file
from reprise.stores import files_of, is_stored, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import batch_problems
from trainer.config.compose import read_resolved, sections_of
from trainer.config.derived import save_folder
from trainer.config.schema import Config
from trainer.config.train import AUTO
from trainer.interop.hf.folder import is_folder, no_folder, trainer_checkpoints
from trainer.interop.llmc import WEIGHTS, foreign
from trainer.interop.megatron.refuse import refuse_megatron
from trainer.interop.start import WeightsKind
from trainer.launch.process_group import Cluster
from trainer.metrics.jsonl_file import last_recorded_iteration, last_saved_iteration
from trainer.record.resume_rules import flattened
from trainer.run.saves import Saves
from trainer.start.identity import find_lineage, find_restart, saved_lineages
from trainer.start.source import Checkpoints, InitialValues, TensorSource, weights_of

_log = logging.getLogger(__name__)

# The kind of source of a run that resumes from its own checkpoints although its command names another beginning.
_OWN = "own"
_SECTIONS_OF_NUMBERS = ("model", "data", "train", "optimizer", "schedule")


@dataclass(frozen=True, slots=True)
class Start:
    """The source and the circumstances of a start, the same on all ranks.

    Args:
        source: of its tensors.
        section: the settings of the load. Those of a beginning (`ckpt_step`, `finetune`, `no_load_optim`) do not apply
            when a run resumes from its own checkpoint although its command names its first source. With `no_save_optim`
            its own checkpoints have no optimizer, and `no_load_optim` applies.
        lineage: of the run until now.
        began_elsewhere: whether the iterations until now may be another run's; this run has no records of them then.
        keeps_weights: whether the weights saved before are this run's.
    """

    source: TensorSource
    section: CheckpointSection
    lineage: Lineage
    began_elsewhere: bool
    keeps_weights: bool


def decide(config: Config, cluster: Cluster, saves: Saves) -> Start:
    """Decide what a run starts from, as rank 0 sees it, and take the locks of the folders it saves into. Collective.

    Raises:
        TrainerError: on every rank, if it cannot start so.
    """
    lineage = saves.start(lambda: find_lineage(config, cluster.channel, saves))
    section = config.checkpoint
    is_restarted = section.is_directed and find_restart(cluster, saves)

    def choose() -> Json:
        try:
            return Patience().retry(lambda: _choose(config, saves, lineage, is_restarted=is_restarted))
        except OSError as error:
            raise failed_read(
                "A path cannot be read", error, where=section.load, fix="Correct checkpoint.load."
            ) from error

    choice: Json = cluster.channel.from_first("start", choose)
    goes_on = choice.get("kind") == _OWN
    if goes_on:
        no_load_optim = section.no_load_optim and section.no_save_optim
        section = replace(section, finetune=False, no_load_optim=no_load_optim, ckpt_step=None)
    is_own = bool(choice) and (goes_on or section.load == "auto")
    source: TensorSource = InitialValues()
    if choice.get("kind") in (_OWN, "checkpoint"):
        folder = LoadSource(location(choice["path"]), section.ckpt_step, terms.LOAD, lineage if is_own else None)
        source = Checkpoints(folder, section.loads_weights_alone, is_own)
    elif choice:
        source = weights_of(choice)
    if not isinstance(source, Checkpoints):
        require_batches(config, cluster.world_size, 0)
    return Start(
        source,
        section,
        lineage,
        began_elsewhere=(section.finetune if not choice else not goes_on)
        if section.load != "auto"
        else isinstance(source, Checkpoints) and not lineage.branches,  # of an import: a run's own launch records one
        keeps_weights=_keeps_weights(config, source, section),
    )


def named_source(path: Path, *, with_weights: bool = True) -> Json:
    """Return the kind and the path of the user's source; a run may be named by its folder.

    Args:
        with_weights: whether the source may be weights of another program.

    Raises:
        CheckpointError: if a run cannot start from the file.
        MismatchError: if it is a Megatron checkpoint, adapters of PEFT, or weights where these are not allowed.
    """
    if is_stored(path):
        return {"kind": "checkpoint", "path": str(LoadSource.named(path).path)}
    refuse_megatron(path)
    if is_file(path / ADAPTERS) and not exists(path / MANIFEST):
        raise MismatchError(
            "Adapters in PEFT's form alone neither continue a run nor are a base",
            where=path,
            found=f"{ADAPTERS} without {MANIFEST}",
            fix="Name the checkpoint of the run that trained them, or the weights that they were trained on.",
        )
    if not with_weights and (is_file(path) or is_folder(path)):
        raise MismatchError(
            "Adapters continue from a checkpoint of adapters",
            where=path,
            found="weights of another program",
            fix="Set checkpoint.base to these weights, and checkpoint.load to a checkpoint or leave it out.",
        )
    if is_file(path) and (form := foreign(path)) is not None:
        raise CheckpointError(
            "A run cannot start from a file of this format",
            where=path,
            expected=f"weights of llm.c, with {WEIGHTS}",
            found=form,
            fix="Set checkpoint.load to a run, a checkpoint, a transformers folder or such a file; "
            "`reprise convert import` reads other formats.",
        )
    if is_file(path) or is_folder(path):
        kind = WeightsKind.file if is_file(path) else WeightsKind.folder
        return {"kind": kind.value, "path": str(path)}
    source = LoadSource.named(path).path
    if source == path and trainer_checkpoints(path) and not CheckpointFolder(path, files_of(path)).committed():
        raise no_folder(path)
    return {"kind": "checkpoint", "path": str(source)}


def require_batches(config: Config, world_size: int, consumed_samples: int) -> None:
    """Refuse global batch sizes, from a position on, indivisible by the ranks.

    Raises:
        MismatchError: on every rank, listing them.
    """
    problems = batch_problems(config, world_size, consumed_samples)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise MismatchError(f"The run cannot go on from sample {consumed_samples}:\n{lines}\nNothing was trained")


def _keeps_weights(config: Config, source: TensorSource, section: CheckpointSection) -> bool:
    run_folder = save_folder(config.checkpoint)
    if run_folder is None or not isinstance(source, Checkpoints) or section.finetune:
        return False
    path = source.source.path.resolve()
    return run_folder.resolve() in (path, *path.parents)


def _choose(config: Config, saves: Saves, lineage: Lineage, *, is_restarted: bool) -> Json:
    """Return the kind and the path of the source; empty for a fresh start. Rank 0 only.

    A path in `checkpoint.load` outside this run's own folder is the start of the run. With `finetune` so is a path
    inside it, such as imported weights. Once the run has its own checkpoint (beyond iteration 0 in the second case),
    the same command resumes from it. A launch restarted by its launcher after a committed checkpoint resumes from it
    with any command.
    """
    section = config.checkpoint
    run_folder = save_folder(section)
    if is_restarted:
        _log.info("this launch was restarted: it resumes from its own newest checkpoint")
        return {"kind": _OWN, "path": str(run_folder)}
    if section.load == "none":
        if not lineage.branches:
            _refuse_mirror(section, fix="Start over with another checkpoint.mirror.")
        return {}
    committed = saves.iterations()
    begins_again = _begins_again(config, saves, lineage, committed)
    if begins_again:
        _log.warning("a start with checkpoint.load=none ended before it trained: the run begins again")
        committed = []
    if section.load != "auto":
        path = location(section.load)
        if not is_stored(path):  # a run with checkpoints of its own goes on while the store is away
            path = LoadSource.named(path).path
        is_inside = run_folder is not None and run_folder.resolve() in (path.resolve(), *path.resolve().parents)
        if section.finetune and any(committed) if is_inside else committed:
            _log.info(f"this run began at {path} and resumes from its own checkpoints")
            return {"kind": _OWN, "path": str(run_folder)}
        if not lineage.branches:
            _refuse_mirror(section, fix="Name another checkpoint.mirror: each run has a URL of its own.")
        if config.model.is_adapted and section.base is None:
            return {}  # the base, which is loaded for itself: the adapters begin
        return named_source(location(section.load), with_weights=not config.model.is_adapted)
    if committed:
        return {"kind": "checkpoint", "path": str(run_folder)}
    if section.ckpt_step is not None:
        raise CheckpointError(
            "The requested iteration was never saved",
            where=section.save or "checkpoint.save=null",
            expected=f"iteration {section.ckpt_step}",
            found="no checkpoint",
            fix="Correct checkpoint.ckpt_step.",
        )
    if not begins_again:
        _refuse_lost_checkpoints(config, saves)
    return {}


def _begins_again(config: Config, saves: Saves, lineage: Lineage, committed: Collection[int]) -> bool:
    """Return whether the remains of the run were given up by a fresh start without an iteration of training.

    Args:
        committed: the iterations a start could resume from, except those the run has given up.
    """
    if len(lineage.branches) < 2 or lineage.branches[-1].began_at != FRESH:
        return False
    shared = saves.shared
    if committed:
        saved = () if shared is None else saved_lineages(shared)
        given_up = [
            number for number, branch in saved if branch.run == lineage.run and not lineage.admits(branch, number)
        ]
        return sorted(committed) == sorted(given_up)
    if shared is not None and shared.tracker() is not None:  # a fresh start removes it first
        return False
    abandoned = saves.superseded()
    last_saved = last_saved_iteration(Path(config.run.dir) / "metrics.jsonl")
    return last_saved is not None and last_saved in abandoned  # else its lines are those of the fresh start


def _refuse_lost_checkpoints(config: Config, saves: Saves) -> None:
    """Refuse a fresh start if the records or the tracker show earlier checkpoints, or iterations of another beginning.

    Iterations before the first save are trained again by the command that trained them.
    """
    metrics, save, shared = Path(config.run.dir) / "metrics.jsonl", config.checkpoint.save, saves.shared
    url = config.checkpoint.mirror
    mirror = f"go on from the mirror with checkpoint.load={url} and another checkpoint.mirror, " if url else ""
    trained, saved = last_recorded_iteration(metrics), last_saved_iteration(metrics)
    tracked = None if shared is None else shared.tracker()
    earlier = {} if trained is None else flattened(read_resolved(metrics.with_name("config.yaml"))[0])
    if saved is not None or (trained is not None and not (saves.targets and _saves(earlier))):
        raise CheckpointError(
            f"This run has recorded {'iterations' if saved is None else 'saves'} but no checkpoint is there",
            where=metrics,
            expected=f"a checkpoint in {save}" if save else "a checkpoint, but checkpoint.save is null",
            found=f"iteration {trained if saved is None else saved} as the last of them and no iter_ folder",
            fix=f"Mount or restore the checkpoints, {mirror}or start over with checkpoint.load=none.",
        )
    if changes := _changes(earlier, config):
        raise CheckpointError(
            "This run has recorded iterations but no save, and its command has changed",
            where=metrics,
            expected="the settings of its last launch",
            found=f"there {', '.join(changes)}",
            fix="Repeat that command to begin again, or start over with checkpoint.load=none.",
        )
    if shared is not None and tracked is not None:
        raise CheckpointError(
            "The tracker names a checkpoint, but there is none to continue from",
            where=shared.root / TRACKER,
            expected=f"the folder {shared.iteration(tracked).name}",
            found="no iter_ folder",
            fix=f"Restore the checkpoints, {mirror}or start over with checkpoint.load=none.",
        )
    fix = f"Name another checkpoint.mirror, and checkpoint.load={url} to go on from there."
    _refuse_mirror(config.checkpoint, fix=fix)
    if trained is not None:  # by this command
        _log.warning("the run ended at iteration %d, before its first save: it begins again", trained)


def _saves(settings: Mapping[str, object]) -> bool:
    return any(settings.get(key) is not None for key in ("checkpoint.save", "checkpoint.local.dir"))


def _changes(earlier: Mapping[str, object], config: Config) -> list[str]:
    """Return the settings of the last launch, by key, with which a fresh start would have other numbers."""
    current = flattened(sections_of(config))
    changes = [
        f"{key}={value}"
        for key, value in earlier.items()
        if key.partition(".")[0] in _SECTIONS_OF_NUMBERS and (key not in current or current[key] != value)
        if (key, value) != ("train.micro_batch_size", AUTO)  # whose number the file does not have
    ]
    began_at = earlier.get("checkpoint.load", "auto")
    return changes if began_at in ("auto", "none") else [*changes, f"checkpoint.load={began_at}"]


def _refuse_mirror(section: CheckpointSection, *, fix: str) -> None:
    """Refuse a new run whose mirror has checkpoints: its folder is lost, or they are of another run.

    A store that is away refuses no run, and is logged.
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
            expected=f"a checkpoint in {save_folder(section)}, or an empty mirror",
            found=f"iteration {max(committed)} in the mirror",
            fix=fix,
        )
