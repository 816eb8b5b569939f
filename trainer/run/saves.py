"""The folders of a run's saves, as a list: the shared folder, each host's folder, and the folder of weights alone.

Each target has its rule of when it is due. A target absent from the configuration is not in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from models import families
from reprise.errors import TrainerError
from reprise.format import Lineage
from reprise.loading import LoadSource, Restored
from reprise.saving import Checkpointer, Retention, SavePolicy, SaveReport
from reprise.storage import WEIGHTS, CheckpointFolder, Document, Files, FolderTerms, is_dir, iteration_of
from reprise.storage import named_iteration as folder_iteration
from reprise.stores import is_stored, location
from trainer.config import terms
from trainer.config.checkpoint import CheckpointSection
from trainer.config.derived import save_folder
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.run.state import TrainerState

if TYPE_CHECKING:
    from reprise.format import MirrorRule
    from reprise.local import HostFolders, LocalCheckpointer
    from reprise.saving import WeightsCheckpointer


class Moment(Enum):
    """When a run looks for what is due."""

    loaded = auto()  # before the first iteration of a start
    evaluated = auto()  # before the first iteration, with a validation loss that the checkpoints lack
    trained = auto()  # after an iteration
    requested = auto()  # after an iteration, by a file or a time
    stopped = auto()  # the run ends before its last iteration
    finished = auto()


Syncs = tuple[Callable[[], None], ...]

_ALWAYS = (Moment.requested, Moment.stopped, Moment.finished)


class SaveTarget:
    """A folder for saves of a run's state.

    Args:
        saver: saves there.

    Attributes:
        event: the name of its saves in `metrics.jsonl`.
        has_state: whether a run can go on from its checkpoints.
        is_quick: whether it saves before the others.
        is_main: whether its checkpoints outlive the run.
    """

    event: ClassVar[str]
    has_state: ClassVar[bool] = True
    is_quick: ClassVar[bool] = False
    is_main: bool = False

    def __init__(self, saver: Checkpointer) -> None:
        self.saver = saver

    def is_due(self, iteration: int, moment: Moment) -> bool:
        """Return whether the state after `iteration` is to be saved."""
        return moment in _ALWAYS or self.saver.is_due(iteration)

    def save(self, state: TrainerState, documents: Mapping[str, Document], syncs: Syncs = ()) -> SaveReport | None:
        """Save the current state with these files; see `Checkpointer.save` and `Contents.syncs`."""
        return self.saver.save(state.progress.iteration, state.contents(documents, with_optimizer=True, syncs=syncs))

    def iterations(self) -> list[int]:
        """Return the iterations a start of the run could resume from. Rank 0 only."""
        return []

    def superseded(self) -> set[int | None]:
        """Return the iterations the run has given up. Rank 0 only."""
        return set()

    def start(self, lineage: Lineage) -> None:
        """Take the lock, and settle what dead attempts left.

        Raises:
            TrainerError: as `Checkpointer.start`.
        """
        self.saver.start()

    def loaded(self, restored: Restored) -> None:
        """Take note of the checkpoint at the start of the run."""

    def rewind(self, iteration: int, *, is_own: bool) -> None:
        """Rename checkpoints newer than `iteration` out of the way.

        Args:
            is_own: whether the run goes on from a checkpoint of its own.
        """
        self.saver.rewind(iteration)

    def await_copies(self) -> None:
        """Wait for copies that would block a copy of the next save."""

    def close(self) -> None:
        """Wait for the running save, and release the lock."""
        self.saver.close()


class SharedTarget(SaveTarget):
    """The checkpoints in the folder shared by all hosts.

    Args:
        has_local: whether the run saves local checkpoints too, which may be newer than the shared.
    """

    event = "save"
    is_main = True

    def __init__(
        self, saver: Checkpointer, folder: CheckpointFolder, section: CheckpointSection, *, has_local: bool
    ) -> None:
        super().__init__(saver)
        self.folder = folder
        self._section, self._has_local = section, has_local

    def is_due(self, iteration: int, moment: Moment) -> bool:
        if moment is Moment.loaded and not self._has_local:
            return False
        if moment is Moment.stopped and self._has_local:
            return self._section.local.flush_on_exit
        return super().is_due(iteration, moment)

    def save(self, state: TrainerState, documents: Mapping[str, Document], syncs: Syncs = ()) -> SaveReport | None:
        iteration = state.progress.iteration
        with_optimizer = not self._section.no_save_optim or iteration in self._section.full_steps
        return self.saver.save(iteration, state.contents(documents, with_optimizer=with_optimizer, syncs=syncs))

    def iterations(self) -> list[int]:
        return [*self.folder.committed(), *self.folder.non_folders()]  # no load accepts the latter

    def superseded(self) -> set[int | None]:
        return {folder_iteration(path.name) for path in self.folder.superseded()}

    def loaded(self, restored: Restored) -> None:
        self.saver.loaded(restored)


class LocalTarget(SaveTarget):
    """The checkpoints in a folder of each host.

    Args:
        is_main: whether there is no shared folder.
    """

    event = "local_save"
    is_quick = True

    def __init__(self, owner: LocalCheckpointer, *, is_main: bool) -> None:
        super().__init__(owner.saver)
        self._owner, self.is_main = owner, is_main
        self.folders = owner.folders

    def iterations(self) -> list[int]:
        return self.folders.iterations

    def superseded(self) -> set[int | None]:
        return {
            *map(folder_iteration, (path.name for path in self.folders.folder.superseded())),
            *self.folders.given_up,
        }

    def start(self, lineage: Lineage) -> None:
        self._owner.start(lineage)

    def loaded(self, restored: Restored) -> None:
        self._owner.loaded(restored)

    def rewind(self, iteration: int, *, is_own: bool) -> None:
        self._owner.rewind(iteration)

    def await_copies(self) -> None:
        self._owner.await_copies()

    def close(self) -> None:
        self._owner.close()


class WeightsTarget(SaveTarget):
    """The weights alone, with the dtype in `config.json`."""

    event = "weights_save"
    has_state = False

    def __init__(self, owner: WeightsCheckpointer, config: Config) -> None:
        super().__init__(owner.saver)
        self._owner = owner
        self._files: dict[str, Document] = {}
        if not config.model.is_adapted:  # PEFT's configuration of adapters has no dtype
            dtype = config.checkpoint.weights_dtype.value
            self._files["config.json"] = {**families.hf_config(config.model), "dtype": dtype}

    def is_due(self, iteration: int, moment: Moment) -> bool:
        return self._owner.is_due(iteration)

    def save(self, state: TrainerState, documents: Mapping[str, Document], syncs: Syncs = ()) -> SaveReport | None:
        contents = state.contents({**documents, **self._files}, with_optimizer=False, syncs=syncs)
        return self._owner.save(state.progress.iteration, contents)

    def rewind(self, iteration: int, *, is_own: bool) -> None:
        self._owner.rewind(iteration if is_own else -1)


@dataclass(frozen=True, slots=True)
class Saves:
    """The targets of a run; none where it saves nothing.

    Args:
        files: the store in which they lie, and those that the run loads from.
    """

    targets: tuple[SaveTarget, ...]
    files: Files

    def __iter__(self) -> Iterator[SaveTarget]:
        """Yield the targets: the shared folder, the local ones, the weights."""
        return iter(self.targets)

    def due(self, iteration: int, moment: Moment) -> list[SaveTarget]:
        """Return the due targets, in the order of their saves: local saves take less time."""
        due = [target for target in self.targets if target.is_due(iteration, moment)]
        return sorted(due, key=lambda target: not target.is_quick)

    def outlasting(self, saved: Sequence[SaveTarget]) -> list[SaveTarget]:
        """Return the targets whose last save decides whether the end of a run is on disk.

        They are the last of the targets with its state, and the weights.

        Args:
            saved: where the run has saved its end, in order; local checkpoints count only without shared ones.
        """
        weights = [target for target in self.targets if not target.has_state]
        return [*[target for target in saved if target.has_state][-1:], *weights]

    @property
    def host_folders(self) -> HostFolders | None:
        """Return the folders of local checkpoints; None without them."""
        return next((target.folders for target in self.targets if isinstance(target, LocalTarget)), None)

    @property
    def folders(self) -> list[CheckpointFolder]:
        """Return the folders of checkpoints with state, the shared one first; on a host, its own of local ones."""
        shared = [] if self.shared is None else [self.shared]
        return shared if self.host_folders is None else [*shared, self.host_folders.folder]

    @property
    def leads(self) -> bool:
        """Return whether this rank leads a host with local checkpoints."""
        return self.host_folders is not None and self.host_folders.leads

    @property
    def shared(self) -> CheckpointFolder | None:
        """Return the folder shared by all hosts; None without it."""
        return next((target.folder for target in self.targets if isinstance(target, SharedTarget)), None)

    def iterations(self) -> list[int]:
        """Return the iterations a start of the run could resume from. Rank 0 only."""
        return [iteration for target in self.targets for iteration in target.iterations()]

    @property
    def failed_saves(self) -> int:
        """Return the number of failed saves in a row in the main target."""
        return sum(target.saver.results.failed_saves for target in self.targets if target.is_main)

    @property
    def last_error(self) -> TrainerError | None:
        """Return the error of the main target's last save; None if it did not fail."""
        return next((target.saver.results.last_error for target in self.targets if target.is_main), None)

    @property
    def is_saving(self) -> bool:
        """Return whether a save is under way."""
        return any(target.saver.is_saving for target in self.targets)

    def take_blocked_s(self) -> float:
        """Return for how long saving kept the main thread since the last call."""
        return sum(target.saver.results.take_blocked_s() for target in self.targets)

    def start(self, find_lineage: Callable[[], Lineage]) -> Lineage:
        """Take the locks of all folders, and return the lineage of the run. Collective.

        Args:
            find_lineage: called under the lock of the shared folder, before anything changes in those of the hosts.

        Raises:
            LockError: on every rank, if another job writes to a folder.
            TrainerError: on every rank, if a folder cannot be written, or from `find_lineage`.
        """
        shared = [target for target in self.targets if isinstance(target, SharedTarget)]
        for first in shared:
            first.saver.start()
        lineage = find_lineage()
        for target in self.targets[len(shared) :]:
            target.start(lineage)
        return lineage

    def __enter__(self) -> Saves:
        """Return the targets."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all targets; if the process is about to end with an error, let go of their locks soon."""
        if kind is None:
            self.close()
        else:
            _call_all([target.saver.abandon for target in self.targets])

    def close(self) -> None:
        """Wait for all running saves, and release the locks."""
        _call_all([target.close for target in self.targets])


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, also after an error, which is then raised."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


def build_saves(config: Config, cluster: Cluster, files: Files) -> Saves:
    """Return the targets of a configuration. Collective.

    Weights alone are among them also where they are no longer saved but some are there, to sweep and to rewind.
    """
    section, targets = config.checkpoint, list[SaveTarget]()
    has_local = section.local.dir is not None
    if section.save is not None:
        policy, steps = _save_policy(section, terms.SAVE), frozenset(section.full_steps)
        policy = replace(policy, save_steps=steps, retention=replace(policy.retention, always=steps))
        ranks = cluster.local_ranks
        saver = Checkpointer(policy, cluster.channel, nonce=cluster.nonce, files=files, local_ranks=ranks)
        folder = CheckpointFolder(Path(section.save), files)
        targets.append(SharedTarget(saver, folder, section, has_local=has_local))
    if section.local.dir is not None:
        targets.append(_local_target(section, Path(section.local.dir), cluster, files))
    if section.save is not None:
        is_asked = bool(section.save_weights_interval or section.save_steps)
        weights = Path(section.save) / WEIGHTS
        if cluster.channel.from_first("weights/there", lambda: _is_readable_folder(weights)) or is_asked:
            targets.append(_weights_target(config, cluster, files))
    return Saves(tuple(targets), files)


def _is_readable_folder(path: Path) -> bool:
    try:
        return is_dir(path)
    except PermissionError:
        return False


def _local_target(section: CheckpointSection, folder: Path, cluster: Cluster, files: Files) -> LocalTarget:
    from reprise.local import LocalCheckpointer, LocalPolicy

    local, saving = section.local, _save_policy(section, terms.LOCAL)
    shared, names = None if section.save is None else Path(section.save), saving.retention.named
    if names and shared is not None:  # what the shared folder has needs no memory of the hosts
        names -= frozenset(CheckpointFolder(shared, files).committed())
        saving = replace(saving, retention=Retention(named=names))
    policy = LocalPolicy(folder, local.save_interval, local.keep, local.copies, saving)
    owner = LocalCheckpointer(
        policy, cluster.channel, nonce=cluster.nonce, local_ranks=cluster.local_ranks, files=files
    )
    return LocalTarget(owner, is_main=shared is None)


def _weights_target(config: Config, cluster: Cluster, files: Files) -> WeightsTarget:
    from reprise.saving import WeightsCheckpointer, WeightsPolicy

    section = config.checkpoint
    policy = WeightsPolicy(
        section.save_weights_interval,
        frozenset(section.save_steps),
        getattr(torch, section.weights_dtype.value),
        section.weights_keep,
        _save_policy(section, terms.WEIGHTS),
    )
    owner = WeightsCheckpointer(
        policy, cluster.channel, nonce=cluster.nonce, local_ranks=cluster.local_ranks, files=files
    )
    return WeightsTarget(owner, config)


def named_iteration(section: CheckpointSection) -> int | None:
    """Return the iteration of the run's own folder named by its command as its start, or None.

    The same command, repeated, needs the iteration again.
    """
    folder = save_folder(section)
    if folder is None or section.load == "none" or section.finetune:
        return None
    if section.load == "auto":
        return section.ckpt_step
    if is_stored(location(section.load)):
        return None
    path, run_folder = LoadSource.named(Path(section.load)).path.resolve(), folder.resolve()
    return section.ckpt_step if path == run_folder else iteration_of(path) if path.parent == run_folder else None


def _save_policy(section: CheckpointSection, folder_terms: FolderTerms) -> SavePolicy:
    iteration = named_iteration(section)
    return SavePolicy(
        folder=None if section.save is None else Path(section.save),
        save_interval=section.save_interval,
        retention=Retention(
            section.max_checkpoint_keep,
            section.save_retain_interval,
            section.keep_best,
            named=frozenset(() if iteration is None else (iteration,)),
            mirror=_mirror_rule(section),
        ),
        terms=folder_terms,
        file_bytes=section.file_bytes,
        commit_timeout_s=section.commit_timeout_s,
        async_save=section.async_save,
        staging_bytes=section.staging_bytes,
        stall_timeout_s=section.stall_timeout_s,
        check_replicas=section.check_replicas,
    )


def _mirror_rule(section: CheckpointSection) -> MirrorRule | None:
    if section.mirror is None:
        return None
    from trainer.run.mirror import rule_of

    return rule_of(section)
