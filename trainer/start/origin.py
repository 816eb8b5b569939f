"""Decides what a run starts from: its own newest checkpoint, one that the command names, other weights, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from models.adapters import is_adapted
from reprise.errors import CheckpointError, TrainerError, UnreadableError
from reprise.files import Patience, failed_read
from reprise.folder import TRACKER, CheckpointFolder
from reprise.reading import FRESH, Lineage, LoadSource, open_checkpoint, saved_lineage
from trainer.config import terms
from trainer.config.derived import save_folder
from trainer.interop.start import WeightsKind
from trainer.metrics.jsonl_file import last_recorded_iteration, last_saved_iteration
from trainer.run.build import Run
from trainer.start.base_weights import NAMED, OWN, WEIGHTS_KINDS, named_source

_log = logging.getLogger(__name__)


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


def continues_own(run: Run, origin: Origin | None) -> bool:
    """Return whether the run goes on from a checkpoint of its own, so that the weights saved before it are its own."""
    own, section = save_folder(run.config.checkpoint), run.config.checkpoint
    if origin is None or own is None or origin.weights is not None or (section.finetune and not origin.goes_on):
        return False
    path = origin.source.path.resolve()
    return own.resolve() in (path, *path.parents)


def agree_on_origin(run: Run, lineage: Lineage, *, is_restarted: bool) -> Origin | None:
    """Choose the source on rank 0 and broadcast it, because ranks may see a file system differently."""
    problem: TrainerError | None = None
    choice = b""
    if run.cluster.rank == 0:
        try:
            choice = Patience().retry(lambda: _find(run, lineage, is_restarted=is_restarted))
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


def _find(run: Run, lineage: Lineage, *, is_restarted: bool) -> bytes:
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
    committed = run.saves.iterations()
    begins_again = _begins_again(run, lineage, committed)
    if begins_again:
        _log.warning("a start with checkpoint.load=none ended before it trained: the run begins again")
        committed = []
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
    if not begins_again:
        _refuse_lost_checkpoints(run)
    return b""


def _begins_again(run: Run, lineage: Lineage, committed: Collection[int]) -> bool:
    """Return whether all that is left of the run was given up by a fresh start that ended before it trained.

    Args:
        committed: the iterations that a start could go on from, but for those that the run has given up.
    """
    if len(lineage.branches) < 2 or lineage.branches[-1].began_at != FRESH:
        return False
    shared = run.saves.shared
    if committed:
        return shared is not None and sorted(committed) == _given_up(shared, lineage)
    if shared is not None and shared.tracker() is not None:  # a fresh start removes it first
        return False
    abandoned = {iteration for target in run.saves for iteration in target.superseded()}
    last_saved = last_saved_iteration(Path(run.config.run.dir) / "metrics.jsonl")
    return last_saved is not None and last_saved in abandoned  # else its lines are those of the fresh start


def _given_up(folder: CheckpointFolder, lineage: Lineage) -> list[int]:
    """Return the committed iterations of branches that the run has given up, in ascending order.

    Raises:
        UnreadableError: if one cannot be read at the moment.
    """
    found = []
    for iteration in folder.committed():
        path = folder.iteration(iteration)
        try:
            saved = saved_lineage(open_checkpoint(path, folder.files, may_lack=True).state, where=path)
        except UnreadableError:
            raise
        except TrainerError as error:  # damaged: it does not say which branch it is of
            _log.debug("%s tells no lineage: %s", path, error)
            continue
        if saved.run == lineage.run and not lineage.admits(saved, iteration):
            found.append(iteration)
    return found


def _refuse_lost_checkpoints(run: Run) -> None:
    """Refuse a fresh start if the records or the tracker show that checkpoints existed."""
    metrics, save, own = Path(run.config.run.dir) / "metrics.jsonl", run.config.checkpoint.save, run.saves.shared
    last = last_recorded_iteration(metrics)
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
