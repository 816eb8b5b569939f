"""A run's save folders, as a list: the shared folder, each host's folder, and the weights-only folder.

Unused folders are not in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from models import families
from reprise.format import Journal
from reprise.loading import LoadSource
from reprise.saving import Checkpointer, Retention, SavePolicy, SaveReport, SaveResults
from reprise.storage import FILE_SYSTEM, WEIGHTS, CheckpointFolder, Document, is_dir, iteration_of
from reprise.stores import is_stored, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.run.state import TrainerState
from trainer.saves.mirror import rule_of

if TYPE_CHECKING:
    from reprise.local import HostFolders, LocalCheckpointer


class Moment(Enum):
    """When a run checks whether something is due."""

    loaded = auto()  # before the first iteration of a start
    evaluated = auto()  # before the first iteration, with a validation loss missing from the checkpoints
    trained = auto()  # after an iteration
    requested = auto()  # after an iteration, because of elapsed time
    stopped = auto()  # the run ends before its last iteration
    finished = auto()


Calls: TypeAlias = tuple[Callable[[], None], ...]
_AT_ANY_ITERATION = {Moment.requested: True, Moment.stopped: True, Moment.finished: True}


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """A folder for a run's saves, and the rule when a save is due.

    Args:
        event: The name for its saves in `metrics.jsonl`.
        interval: Save at every multiple of this iteration count. 0 for none.
        steps: Iterations to save as well.
        moments: By moment, whether a save is due regardless of the iteration. At other moments the schedule decides.
        has_state: Whether a run can resume from its checkpoints.
        is_light: Whether saves at other iterations than `steps` have no optimizer state.
        files: Additional files in its saves.
    """

    event: str
    saver: Checkpointer
    interval: int
    steps: frozenset[int] = frozenset()
    moments: Mapping[Moment, bool] = field(default_factory=lambda: _AT_ANY_ITERATION)
    has_state: bool = True
    is_light: bool = False
    files: Mapping[str, Document] = field(default_factory=dict)

    def is_scheduled(self, iteration: int) -> bool:
        """Return whether the configuration schedules a save after `iteration`."""
        is_multiple = self.interval > 0 and iteration > 0 and iteration % self.interval == 0
        return is_multiple or iteration in self.steps

    def is_due(self, iteration: int, moment: Moment) -> bool:
        """Return whether to save the state after `iteration`."""
        return self.moments.get(moment, self.is_scheduled(iteration))

    def save(
        self,
        state: TrainerState,
        documents: Mapping[str, Document],
        *,
        syncs: Calls,
        notes: Calls,
    ) -> SaveReport | None:
        """Save the current state with these files. See `Checkpointer.save` and `Contents`."""
        iteration = state.progress.iteration
        with_optimizer = self.has_state and not (self.is_light and iteration not in self.steps)
        contents = state.contents(with_optimizer=with_optimizer)
        documents = {**documents, **self.files}
        return self.saver.save(iteration, replace(contents, documents=documents, syncs=syncs, notes=notes))


@dataclass(frozen=True, slots=True)
class Saves:
    """A run's save targets. Empty if it saves nothing.

    Args:
        targets: The shared folder, the local folder, and the weights-only folder, if used.
        shared: The folder shared by all hosts, if any.
        local: The saver for local checkpoints, if any.
    """

    targets: tuple[SaveTarget, ...]
    shared: CheckpointFolder | None = None
    local: LocalCheckpointer | None = None

    def due(self, iteration: int, moment: Moment) -> list[SaveTarget]:
        """Return the due targets in save order: local saves come first because they take less time."""
        due = [target for target in self.targets if target.is_due(iteration, moment)]
        return sorted(due, key=lambda target: target.saver is not self.local)

    def outlasting(self, saved: Sequence[SaveTarget]) -> list[SaveTarget]:
        """Return the targets whose last save decides whether the run's final state is on disk.

        They are the last target with that state, and the weights.

        Args:
            saved: The targets with the final state, in save order. Local checkpoints count only without a shared
                folder.
        """
        weights = [target for target in self.targets if not target.has_state]
        return [*[target for target in saved if target.has_state][-1:], *weights]

    @property
    def host_folders(self) -> HostFolders | None:
        """Return the folders for local checkpoints. None without them."""
        return None if self.local is None else self.local.folders

    def iterations(self) -> list[int]:
        """Return the iterations from which a start could resume. Rank 0 only."""
        shared = [] if self.shared is None else [*self.shared.taken()]
        return shared if self.local is None else [*shared, *self.local.folders.iterations]

    @property
    def main(self) -> SaveResults:
        """Return the results for the first target, whose checkpoints outlive the run."""
        return self.targets[0].saver.results if self.targets else SaveResults()

    @property
    def is_saving(self) -> bool:
        """Return whether a save is under way."""
        return any(target.saver.is_saving for target in self.targets)

    def take_blocked_s(self) -> float:
        """Return the seconds for which saving has blocked the main thread since the last call."""
        return sum(target.saver.results.take_blocked_s() for target in self.targets)

    def start(self, find_journal: Callable[[], Journal]) -> Journal:
        """Take all folders' locks, and return the run's journal. Collective.

        Args:
            find_journal: Finds the journal. Called under the shared folder's lock, before the hosts' folders change.

        Raises:
            LockError: Another job writes to a folder. Every rank raises.
            TrainerError: A folder cannot be written, or `find_journal` raises. Every rank raises.
        """
        savers = [target.saver for target in self.targets]
        if self.shared is not None:
            savers.pop(0).start()
        journal = find_journal()
        for saver in savers:
            saver.start() if self.local is not saver else self.local.start(journal.lineage)
        return journal

    def rewind(self, iteration: int, *, keeps_weights: bool) -> None:
        """Rename checkpoints newer than `iteration` out of the way.

        Args:
            keeps_weights: Whether the run continues from its own checkpoint.
        """
        for target in self.targets:
            newest = iteration if target.has_state or keeps_weights else -1
            target.saver.rewind(newest)
            if not target.has_state:  # an earlier launch may have ended between its checkpoint and its weights
                target.saver.find_saved(newest)

    def __enter__(self) -> Saves:
        """Return the targets."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all targets. If the process is about to end with an error, release their locks soon."""
        with ExitStack() as stack:
            for target in reversed(self.targets):
                stack.callback(target.saver.close if kind is None else target.saver.abandon)


def build_saves(config: Config, cluster: Cluster) -> Saves:
    """Return a configuration's save targets. Collective.

    The weights-only target is also included if its folder exists but weights are no longer saved, to sweep and rewind
    it.
    """
    section, local = config.checkpoint, config.checkpoint.local
    targets, shared, host_saver = list[SaveTarget](), None, None
    channel, iteration = cluster.channel, named_iteration(section)
    sources = frozenset(() if iteration is None else (iteration,))
    policy = SavePolicy(
        folder=Path(section.save or local.dir or ""),
        file_bytes=section.file_bytes,
        commit_timeout_s=section.commit_timeout_s,
        async_save=section.async_save,
        staging_bytes=section.staging_bytes,
        stall_timeout_s=section.stall_timeout_s,
        check_replicas=section.check_replicas,
        terms=terms.SAVE,
    )
    if section.save is not None:
        shared = CheckpointFolder(Path(section.save), FILE_SYSTEM)
        targets.append(_shared_target(section, cluster, policy, sources))
    if local.dir is not None:
        from reprise.local import LocalCheckpointer

        if sources and shared is not None:  # hosts need not keep what the shared folder has
            sources -= frozenset(shared.committed())
        host_policy = replace(
            policy, folder=Path(local.dir), retention=Retention(local.keep, kept=sources), terms=terms.LOCAL
        )
        host_saver = LocalCheckpointer(
            host_policy, channel, nonce=cluster.nonce, copies=local.copies, local_ranks=cluster.local_ranks
        )
        targets.append(SaveTarget("local_save", host_saver, local.save_interval))
    if shared is not None:
        folder, steps = shared.root / WEIGHTS, frozenset(section.save_steps)
        if channel.from_first("weights/there", lambda: _is_readable_folder(folder)) or (
            section.save_weights_interval or steps
        ):
            targets.append(_weights_target(config, cluster, replace(policy, folder=folder)))
    return Saves(tuple(targets), shared, host_saver)


def _shared_target(
    section: CheckpointSection, cluster: Cluster, policy: SavePolicy, sources: frozenset[int]
) -> SaveTarget:
    """Return the shared folder's target. With local checkpoints, `flush_on_exit` decides on its save at a stop."""
    steps, local = frozenset(section.full_steps), section.local
    retention = Retention(
        section.max_checkpoint_keep,
        section.save_retain_interval,
        section.keep_best,
        kept=steps | sources,
        mirror=rule_of(section),
    )
    policy, ranks = replace(policy, retention=retention), cluster.local_ranks
    return SaveTarget(
        "save",
        Checkpointer(policy, cluster.channel, nonce=cluster.nonce, local_ranks=ranks),
        section.save_interval,
        steps,
        _AT_ANY_ITERATION | ({Moment.loaded: False} if local.dir is None else {Moment.stopped: local.flush_on_exit}),
        is_light=section.no_save_optim,
    )


def _weights_target(config: Config, cluster: Cluster, policy: SavePolicy) -> SaveTarget:
    """Return the weights-only target, with its dtype in `config.json`."""
    section, documents = config.checkpoint, dict[str, Document]()
    steps, mirror, dtype = frozenset(section.save_steps), rule_of(section), section.weights_dtype.value
    if mirror is not None:
        mirror = replace(mirror, prefix=f"{WEIGHTS}/")
    if not config.model.is_adapted:  # PEFT's adapter configuration has no dtype
        documents["config.json"] = {**families.hf_config(config.model), "dtype": dtype}
    policy = replace(
        policy,
        retention=Retention(section.weights_keep, kept=steps, mirror=mirror),
        terms=terms.WEIGHTS,
        dtype=None if dtype == "float32" else getattr(torch, dtype),
    )
    nonce, ranks = f"{cluster.nonce}-{WEIGHTS}", cluster.local_ranks
    saver = Checkpointer(policy, cluster.channel, nonce=nonce, local_ranks=ranks)
    return SaveTarget(
        "weights_save",
        saver,
        section.save_weights_interval,
        steps,
        {},
        has_state=False,
        files=documents,
    )


def _is_readable_folder(path: Path) -> bool:
    try:
        return is_dir(path)
    except PermissionError:
        return False


def named_iteration(section: CheckpointSection) -> int | None:
    """Return the iteration in the run's own folder from which its command starts, or None.

    The same command, repeated, needs this iteration again.
    """
    folder = section.folder
    if folder is None or section.load == "none" or section.finetune:
        return None
    if section.load == "auto":
        return section.ckpt_step
    if is_stored(location(section.load)):
        return None
    path, run_folder = LoadSource.named(Path(section.load)).path.resolve(), folder.resolve()
    return section.ckpt_step if path == run_folder else iteration_of(path) if path.parent == run_folder else None
