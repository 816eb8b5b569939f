"""Decides on a run's source: its own newest checkpoint, the command's checkpoint, other weights, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from reprise.errors import CheckpointError, MismatchError, count_of
from reprise.format import ADAPTERS, FRESH, MANIFEST, Journal, Lineage
from reprise.loading import LoadSource
from reprise.storage import CheckpointFolder, Json, Patience, exists, failed_read, is_file
from reprise.stores import files_of, is_stored, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import batch_problems
from trainer.config.derived import save_folder
from trainer.config.overrides import text_value
from trainer.config.schema import Config
from trainer.interop.hf.config import is_folder
from trainer.interop.hf.folder import no_folder, trainer_checkpoints
from trainer.interop.llmc import WEIGHTS, foreign
from trainer.interop.megatron.refuse import refuse_megatron
from trainer.launch.process_group import Cluster
from trainer.launch.relaunch import Launch
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import last_recorded_iteration, last_saved_iteration
from trainer.saves.targets import Saves
from trainer.start.identity import find_journal, saved_lineages
from trainer.start.journal import RUN_FILE
from trainer.start.source import Checkpoints, InitialValues, TensorSource, Weights

_log = logging.getLogger(__name__)


class Origin(Enum):
    """Where a run starts, or continues from."""

    initial = auto()  # initial values, or initial adapters on a separately loaded base
    named = auto()  # what `checkpoint.load` names
    newest = auto()  # its own newest checkpoint, as its command says
    own = auto()  # the same, although its command names another start


@dataclass(frozen=True, slots=True)
class Past:
    """A run's folders before a start, and what its command finds there.

    Args:
        lineage: The run's lineage.
        saved: The newest save in the run's journal. `FRESH` if it has none, or this start's branch has given it up.
        committed: Iterations from which a start could resume, or that it sets aside.
        trained: The last iteration in `metrics.jsonl`, or None.
        logged: The last save in `metrics.jsonl`, or None.
        source: The path in `checkpoint.load`, or None.
        is_inside: Whether `source` lies in the run's own folder.
        is_restarted: Whether the launcher restarted this launch after it saved.
    """

    lineage: Lineage
    saved: int = FRESH
    committed: Sequence[int] = ()
    trained: int | None = None
    logged: int | None = None
    source: Path | None = None
    is_inside: bool = False
    is_restarted: bool = False

    @property
    def is_anew(self) -> bool:
        """Return whether the newest branch starts an earlier run over, and has saved nothing."""
        branches = self.lineage.branches
        return self.saved == FRESH and len(branches) > 1 and branches[-1].began_at == FRESH


@dataclass(frozen=True, slots=True)
class StartChoice:
    """A start's origin.

    Args:
        line: The log line. Empty for none.
        is_new: Whether the start begins a run, whose mirror must not have checkpoints.
    """

    origin: Origin
    line: str = ""
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A start's source and circumstances, the same on all ranks.

    Args:
        source: The tensors' source.
        section: Settings for the load. The keys for a new start (`ckpt_step`, `finetune`, `no_load_optim`) do not apply
            if a run resumes from its own checkpoint although its command names its first source. With `no_save_optim`,
            its own checkpoints have no optimizer state, and `no_load_optim` applies.
        journal: The run's journal so far.
        keeps_weights: Whether earlier weights-only saves belong to this run.
    """

    source: TensorSource
    section: CheckpointSection
    journal: Journal
    keeps_weights: bool

    @property
    def is_own(self) -> bool:
        """Return whether the source holds this run's checkpoints."""
        return isinstance(self.source, Checkpoints) and self.source.is_own


def decide(config: Config, cluster: Cluster, saves: Saves) -> Start:
    """Decide on a run's source, as rank 0 sees it, and take the locks for its save folders. Collective.

    Raises:
        TrainerError: The run cannot start this way. Every rank raises.
    """
    journal = saves.start(lambda: find_journal(config, cluster, saves))
    section, lineage = config.checkpoint, journal.lineage

    def find() -> Json:
        try:
            return Patience().retry(lambda: _find(config, saves, journal, cluster.launch))
        except OSError as error:
            raise failed_read(
                "A path cannot be read", error, where=section.load, fix="Correct checkpoint.load."
            ) from error

    answer: Json = cluster.channel.from_first("start", find)
    origin, choice = Origin[answer["origin"]], answer["source"]
    if origin is Origin.own:
        no_load_optim = section.no_load_optim and section.no_save_optim
        section = replace(section, finetune=False, no_load_optim=no_load_optim, ckpt_step=None)
    is_own = origin in (Origin.own, Origin.newest)
    source: TensorSource = InitialValues()
    if choice.get("kind") == "checkpoint":
        folder = LoadSource(location(choice["path"]), section.ckpt_step, terms.LOAD, lineage if is_own else None)
        source = Checkpoints(folder, section.loads_weights_alone, is_own)
    elif choice:
        source = Weights(Path(choice["path"]))
    if not isinstance(source, Checkpoints):
        require_batches(config, cluster.world_size, 0)
    return Start(
        source,
        section,
        Journal(lineage, answer["saved"]),
        keeps_weights=_keeps_weights(config, source, section),
    )


def named_source(path: Path, *, with_weights: bool = True) -> Json:
    """Return the kind and path of the user's source. A run may be named by its folder.

    Args:
        with_weights: Whether another program's weights are allowed.

    Raises:
        CheckpointError: A run cannot start from the file.
        MismatchError: It is a Megatron checkpoint, PEFT adapters, or weights where these are not allowed.
    """
    if is_stored(path):
        return {"kind": "checkpoint", "path": str(LoadSource.named(path).path)}
    refuse_megatron(path)
    if is_file(path / ADAPTERS) and not exists(path / MANIFEST):
        raise MismatchError(
            "PEFT adapters alone can neither continue a run nor serve as a base",
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
        return {"kind": "weights", "path": str(path)}
    source = LoadSource.named(path).path
    if source == path and trainer_checkpoints(path) and not CheckpointFolder(path, files_of(path)).committed():
        raise no_folder(path)
    return {"kind": "checkpoint", "path": str(source)}


def require_batches(config: Config, world_size: int, consumed_samples: int) -> None:
    """Refuse global batch sizes, from a position on, if the ranks cannot divide them.

    Raises:
        MismatchError: There are such sizes. The message lists them, and every rank raises.
    """
    problems = batch_problems(config, world_size, consumed_samples)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise MismatchError(f"The run cannot continue from sample {consumed_samples}:\n{lines}\nNothing was trained")


def _lies_in(path: Path, folder: Path | None) -> bool:
    return folder is not None and folder.resolve() in (path.resolve(), *path.resolve().parents)


def _keeps_weights(config: Config, source: TensorSource, section: CheckpointSection) -> bool:
    if not isinstance(source, Checkpoints) or section.finetune:
        return False
    return _lies_in(source.source.path, save_folder(config.checkpoint))


def _find(config: Config, saves: Saves, journal: Journal, launch: Launch) -> Json:
    """Return a start's origin, its source's kind and path, and the newest recorded save. Rank 0 only."""
    section, past = config.checkpoint, _past(config, saves, journal, launch)
    decision, source = choose(past, config), {}
    if decision.is_new:
        _refuse_mirror(section)
    if decision.line:
        _log.log(logging.INFO if decision.origin is Origin.own else logging.WARNING, decision.line)
    if decision.origin in (Origin.own, Origin.newest):
        source = {"kind": "checkpoint", "path": str(save_folder(section))}
    elif decision.origin is Origin.named:
        source = named_source(location(section.load), with_weights=not config.model.is_adapted)
    return {"origin": decision.origin.name, "source": source, "saved": past.saved}


def _past(config: Config, saves: Saves, journal: Journal, launch: Launch) -> Past:
    section, shared, lineage = config.checkpoint, saves.shared, journal.lineage
    past, given_up = Past(lineage, FRESH if journal.saved is None else journal.saved), set[int]()
    if journal.saved is None and shared is not None and not past.is_anew:  # of version 0.2, or damaged
        tracked = shared.tracker()
        past = replace(past, saved=FRESH if tracked is None else tracked)
    if past.is_anew and shared is not None:
        branches = saved_lineages(shared)
        given_up = {n for n, branch in branches if branch.run == lineage.run and not lineage.admits(branch, n)}
    if section.is_directed and not set(launch.earlier).isdisjoint(lineage.launch):
        return replace(past, is_restarted=True)
    if section.load == "none":  # hosts delete what they set aside
        return replace(past, committed=[] if shared is None else shared.committed())
    source, is_inside = None, False
    if section.load != "auto":
        source = location(section.load)
        if not is_stored(source):  # a run with its own checkpoints continues while the store is unreachable
            source = LoadSource.named(source).path
        is_inside = _lies_in(source, save_folder(section))
    committed = [number for number in saves.iterations() if number not in given_up]
    past = replace(past, committed=committed, source=source, is_inside=is_inside)
    if committed:
        return past
    metrics = Path(config.run.dir) / METRICS
    return replace(past, trained=last_recorded_iteration(metrics), logged=last_saved_iteration(metrics))


def choose(past: Past, config: Config) -> StartChoice:
    """Return where a run starts, or continues from. Pure.

    A path in `checkpoint.load` outside the run's own folder is the run's start. With `finetune`, so is a path inside
    it, such as imported weights. Once the run has its own checkpoint (beyond iteration 0 in the second case), the same
    command resumes from it. A launch restarted by its launcher after a committed checkpoint resumes from it with any
    command.

    Raises:
        CheckpointError: The run's checkpoints are missing.
    """
    section, committed, line = config.checkpoint, past.committed, ""
    is_new = not past.lineage.branches
    if past.is_restarted:
        return StartChoice(Origin.own, "this launch was restarted: it resumes from its own newest checkpoint")
    if section.load == "none":
        return StartChoice(Origin.initial, _set_aside(committed, config), is_new)
    begins_again = past.is_anew and not committed and past.logged is not None  # else any lines are from the fresh start
    if begins_again:
        line = "a start with checkpoint.load=none ended before it trained: the run starts over"
    if section.load != "auto":
        if section.finetune and any(committed) if past.is_inside else committed:
            return StartChoice(Origin.own, f"this run began at {past.source} and resumes from its own checkpoints")
        is_base = config.model.is_adapted and section.base is None
        return StartChoice(Origin.initial if is_base else Origin.named, line, is_new)
    if committed:
        return StartChoice(Origin.newest)
    if section.ckpt_step is not None:
        raise CheckpointError(
            "The requested iteration was never saved",
            where=section.save or "checkpoint.save=null",
            expected=f"iteration {section.ckpt_step}",
            found="no checkpoint",
            fix="Correct checkpoint.ckpt_step.",
        )
    if begins_again:
        return StartChoice(Origin.initial, line)
    _refuse_lost_checkpoints(past, config)
    if past.trained is not None:
        line = f"the run ended at iteration {past.trained}, before its first save: it starts over"
    return StartChoice(Origin.initial, line, is_new=True)


def _set_aside(committed: Collection[int], config: Config) -> str:
    """Describe what `checkpoint.load=none` does to the run's checkpoints. Empty without checkpoints."""
    if not committed:
        return ""
    return (
        f"checkpoint.load=none sets aside {count_of(len(set(committed)), 'checkpoint')} of this run, the newest of "
        f"iteration {max(committed)}: they become iter_*.superseded-*. To leave them as they are, stop and start "
        f"another run: run.name={text_value(config.run.name + '-2')}"
    )


def _refuse_lost_checkpoints(past: Past, config: Config) -> None:
    """Refuse a fresh start if the run has saved."""
    save, url, folder = config.checkpoint.save, config.checkpoint.mirror, Path(config.run.dir)
    # A commit can outlive a process killed before it is noted in the journal.
    saved = past.saved if past.logged is None else max(past.saved, past.logged)
    if saved > FRESH:
        mirror = f"continue from the mirror with checkpoint.load={url} and another checkpoint.mirror, " if url else ""
        raise CheckpointError(
            "This run has recorded saves but no checkpoint is there",
            where=folder / (RUN_FILE if past.saved == saved else METRICS),
            expected=f"a checkpoint in {save}" if save else "a checkpoint, but checkpoint.save is null",
            found=f"iteration {saved} as the last, and no iter_ folder",
            fix=f"Mount or restore the checkpoints, {mirror}or start over with checkpoint.load=none.",
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
            expected=f"a checkpoint in {save_folder(section)}, or an empty mirror",
            found=f"iteration {max(committed)} in the mirror",
            fix="Set another checkpoint.mirror: each run needs its own URL. To continue from these checkpoints, also "
            f"set checkpoint.load={section.mirror}.",
        )
