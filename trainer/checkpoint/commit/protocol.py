"""How the ranks turn what they wrote into one checkpoint, or agree that it is none. `writer.py` writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.checkpoint.commit import commit_state, disagreement
from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.commit.commit_state import Action, CommitState, Event, Outcome
from trainer.checkpoint.commit.inventory import Inventory, identity_of
from trainer.checkpoint.format import json_file, manifest
from trainer.checkpoint.format.layout import Layout, model_index
from trainer.checkpoint.format.manifest import FileEntry, Manifest, Written, WrittenPiece
from trainer.checkpoint.format.names import INDEX, MANIFEST
from trainer.checkpoint.format.report import RankReport, decode, encode
from trainer.checkpoint.storage.files import describe_free_space
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.errors import CheckpointError, LaunchError, TrainerError

_log = logging.getLogger(__name__)

# The first two bytes of a decision; after _ASK, that of two ranks which are to send their tables comes later.
_OK, _FAILED, _ASK = b"ok", b"no", b"??"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save an iteration: `name` is unique in the life of the folder, the same on all ranks."""

    iteration: int
    name: str
    folder: CheckpointFolder
    layout: Layout

    @property
    def mark(self) -> Path:
        """Return the file that every rank must see before it reports, where there are several ranks."""
        return self.folder.mark_of(self.iteration, self.name)


class SharedCommitState:
    """The state of one attempt on one rank, for the two threads that have a say in it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._state = CommitState.of(rank, world_size)
        self._lock = threading.Lock()

    @property
    def current(self) -> CommitState:
        """Return what is known now."""
        return self._state

    def take(self, event: Event) -> Action:
        """Take an event in, whole and alone, and return what is to be done."""
        with self._lock:
            self._state, action = commit_state.advance(self._state, event)
            return action

    def begin_rename(self) -> None:
        """Say that the rename comes next: whoever aborts from here on comes too late.

        Raises:
            CheckpointError: if the attempt was aborted before.
        """
        if self.take(commit_state.ReadyToRename()) is not Action.RENAME:
            raise CheckpointError(str(self._state.problem).rstrip("."))


BeginRename = Callable[[], None]
Publish = Callable[[list[WrittenPiece], BeginRename], list[int]]


def exchange(
    channel: StoreChannel,
    attempt: Attempt,
    *,
    inventory: Inventory,
    work: Callable[[], Written],
    publish: Publish,
    shared: SharedCommitState,
) -> list[int] | None:
    """Run `work` on every rank and, if all succeed and agree, `publish` on rank 0; all ranks learn the outcome.

    Args:
        inventory: what this rank saves; complete once `work` has returned.
        publish: makes the checkpoint of all ranks' pieces; it calls what it is given right before the rename, and ends
            if that raises.
        shared: of this attempt on this rank; another thread may `abort` on it meanwhile.

    Returns:
        What `publish` returned, the iterations that are to be deleted now; None where that message was lost.

    Raises:
        ReplicaError: on rank 0, if ranks that hold the same tensor hold different bits of it.
        TrainerError: on every rank, if the attempt did not become a checkpoint.
        BaseException: on the rank where `work` or `publish` raised it; the others get a CheckpointError that names it.
    """
    part = _Part(channel, attempt, inventory, work, publish, shared)
    action = shared.take(part.work())
    while action is not Action.END:
        for event in part.perform(action):
            action = shared.take(event)
    if shared.current.outcome is Outcome.COMMITTED:
        return part.expired
    raise part.error or CheckpointError(str(shared.current.problem).rstrip("."))


class _Part:
    """What one rank does for an attempt, and what came of it; `error` is what it met first."""

    def __init__(
        self,
        channel: StoreChannel,
        attempt: Attempt,
        inventory: Inventory,
        work: Callable[[], Written],
        publish: Publish,
        shared: SharedCommitState,
    ) -> None:
        self._channel, self._attempt, self._inventory = channel, attempt, inventory
        self._work, self._publish, self._shared = work, publish, shared
        self._key = _key(attempt.name)
        self._report = RankReport(attempt.iteration, inventory.identity)
        self._reports: list[RankReport] = []
        self.expired: list[int] | None = None
        self.error: BaseException | None = None

    def work(self) -> Event:
        """Write this rank's part."""
        try:
            written = self._work()
            self._report = replace(
                self._report,
                groups=self._inventory.groups(),
                written_bytes=written.total_bytes,
                pieces=encode(written.pieces, self._attempt.layout),
            )
        except BaseException as error:  # noqa: BLE001 - raised again once the peers know
            self.error = error
            self._report = replace(self._report, problem=_text(error))
            return commit_state.Failed(_text(error))
        self._reports = [self._report]  # all there are, where there is one rank
        return commit_state.Wrote()

    def perform(self, action: Action) -> list[Event]:
        """Do what is to be done next, and return what came of it."""
        try:
            match action:
                case Action.REPORT:
                    self._channel.gather(f"{self._key}/report", self._report.to_bytes())
                    return [commit_state.ReportStored()]
                case Action.AWAIT_DECISION:
                    return [self._heard(self._await_decision())]
                case Action.LOOK:
                    return [
                        commit_state.FoundCommitted() if is_committed(self._attempt) else commit_state.FoundNothing()
                    ]
                case Action.COLLECT:
                    return self._collect()
                case Action.PUBLISH:
                    return [self._make()]
                case Action.ANNOUNCE:
                    _announce(self._channel, self._key, self._decision())
                    return [commit_state.Broadcast()]
        except LaunchError as error:
            self.error = self.error or error
            return [commit_state.Silence(str(error))]
        raise AssertionError(f"{action} is nothing to perform")

    def _collect(self) -> list[Event]:
        try:
            reports = self._channel.gather(f"{self._key}/report", self._report.to_bytes())
            self._reports = [RankReport.from_bytes(data) for data in reports]
            self._require_agreement()
        except LaunchError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again once the peers know
            if not (isinstance(error, TrainerError) and isinstance(self.error, TrainerError)):
                error = self.error or error
            self.error = error
            return [commit_state.Failed(_text(error))]
        return [commit_state.ReportArrived(rank, report.problem) for rank, report in enumerate(self._reports) if rank]

    def _require_agreement(self) -> None:
        """Refuse reports of ranks that do not save the same thing; two of them are asked for their tables.

        Raises:
            CheckpointError: naming what differs and the ranks.
            LaunchError: if a rank does not answer.
        """
        disagreement.refuse_other_iterations({r: report.iteration for r, report in enumerate(self._reports)})
        found = disagreement.find(self._reports)
        if found is None:
            return
        asked = [rank for rank in found.witnesses if rank]
        self._channel.broadcast(f"{self._key}/decision", _ASK + " ".join(map(str, asked)).encode())
        keys = {rank: f"{self._key}/table/{rank}" for rank in asked}
        tables = {rank: self._channel.read(key, sender=f"rank {rank}") for rank, key in keys.items()}
        self._channel.forget(list(keys.values()))
        tables[self._channel.rank] = self._inventory.to_bytes()
        raise disagreement.explain(found, [tables[rank] for rank in found.witnesses])

    def _await_decision(self) -> bytes:
        decision = self._channel.broadcast(f"{self._key}/decision", None)
        if not decision.startswith(_ASK):
            return decision
        if self._channel.rank in map(int, decision[len(_ASK) :].split()):
            self._channel.put(f"{self._key}/table/{self._channel.rank}", self._inventory.to_bytes())
        return self._channel.broadcast(f"{self._key}/decision/last", None)

    def _make(self) -> Event:
        layout = self._attempt.layout
        try:
            _check_total(sum(report.written_bytes for report in self._reports), layout)
            pieces = [piece for report in self._reports for piece in decode(report.pieces, layout)]
            self.expired = self._publish(pieces, self._shared.begin_rename)
        except BaseException as error:  # noqa: BLE001 - raised again once the peers know
            self.error = error
            return commit_state.Failed(_text(error))
        return commit_state.Renamed()

    def _decision(self) -> bytes:
        known = self._shared.current
        if known.outcome is Outcome.COMMITTED:
            return _committed(self._attempt.iteration, self.expired or [])
        return _FAILED + str(known.problem).encode()

    def _heard(self, decision: bytes) -> Event:
        if not decision.startswith(_OK):
            return commit_state.Decision(decision[len(_FAILED) :].decode().rstrip("."))
        iteration, *expired = (int(number) for number in decision[len(_OK) :].split())
        if iteration != self._attempt.iteration:
            return commit_state.Decision(f"Rank 0 saved iteration {iteration}, this rank {self._attempt.iteration}")
        self.expired = expired
        return commit_state.Decision(None)


def _committed(iteration: int, expired: Sequence[int]) -> bytes:
    return _OK + " ".join(map(str, [iteration, *expired])).encode()


def _check_total(written_bytes: int, layout: Layout) -> None:
    """Refuse a save in which some rank has counted on another to write its bytes, and that has not."""
    expected = sum(place.spec.total_bytes for place in layout.places.values())
    if written_bytes != expected:
        raise CheckpointError(
            "The ranks have not written every byte once",
            expected=f"{expected} B of tensors",
            found=f"{written_bytes} B",
            fix="Nothing was committed; this is a defect of the program that wrote them.",
        )


def abort(channel: StoreChannel, attempt: Attempt, error: TrainerError, shared: SharedCommitState) -> bool:
    """Fail an attempt in the place of the worker, which hangs, and tell the other ranks.

    Returns:
        Whether it has failed for certain: a rank whose report is out, or that renames already, comes too late.
    """
    action = shared.take(commit_state.Aborted(str(error)))
    key = _key(attempt.name)
    if action is Action.ANNOUNCE:
        _announce(channel, key, _FAILED + _text(error).encode())
    if action is Action.REPORT:
        report = RankReport(attempt.iteration, identity_of(attempt.layout), problem=_text(error))
        try:
            channel.put(f"{key}/report/{channel.rank}", report.to_bytes())
        except LaunchError as lost:
            _log.error("the failure of %s did not go out: %s", key, lost)
    return shared.current.outcome is Outcome.FAILED


def already_committed(channel: StoreChannel, name: str, iteration: int) -> None:
    """Tell a rank that tries to save, as attempt `name`, what rank 0 knows to be there, that it is. Rank 0 only."""
    _announce(channel, _key(name), _committed(iteration, []))


def say_marked(channel: StoreChannel, attempt: Attempt, *, is_marked: bool) -> None:
    """Tell the other ranks whether the mark of an attempt is in its folder. Rank 0 only."""
    channel.broadcast(f"{_key(attempt.name)}/marked", (_OK if is_marked else _FAILED) + str(attempt.iteration).encode())


def await_marked(channel: StoreChannel, attempt: Attempt, *, check: Callable[[], None]) -> bool:
    """Wait until rank 0 has said whether the mark of an attempt is in its folder, and return that.

    Args:
        check: called again and again; ends the wait if it raises.

    Returns:
        False also if rank 0 has ended the attempt, as its decision says.

    Raises:
        LaunchError: if rank 0 says nothing in time.
        CheckpointError: if rank 0 saves another iteration.
    """
    marked = f"{_key(attempt.name)}/marked"
    if channel.await_any([marked, f"{_key(attempt.name)}/decision"], sender="rank 0", check=check) != marked:
        return False
    data = channel.read(marked, sender="rank 0")
    disagreement.refuse_other_iterations({0: int(data[len(_OK) :]), channel.rank: attempt.iteration})
    return data.startswith(_OK)


def keys_of(name: str, rank: int) -> list[str]:
    """Return the keys of what a rank may have posted about attempt `name`: they stay until rank 0 has collected."""
    key = _key(name)
    if rank == 0:
        return [f"{key}/decision", f"{key}/decision/last", f"{key}/marked"]
    return [f"{key}/report/{rank}", f"{key}/table/{rank}"]


def _key(name: str) -> str:
    return f"save/{name}"


def _announce(channel: StoreChannel, key: str, decision: bytes) -> None:
    """Tell all ranks; where the store is gone, they look for the folder: nothing that happened here changes by it.

    A failure goes out twice: a rank that was asked for its table, or saw others being asked, waits for the last word.
    """
    try:
        channel.broadcast(f"{key}/decision", decision)
        if not decision.startswith(_OK):
            channel.broadcast(f"{key}/decision/last", decision)
    except LaunchError as error:
        _log.error("the decision on %s did not go out: %s", key, error)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"


def is_committed(attempt: Attempt) -> bool:
    """Return whether the checkpoint that is there is this attempt's: the rename is the truth."""
    path = attempt.folder.iteration(attempt.iteration) / MANIFEST
    try:
        return manifest.from_bytes(path.read_bytes(), where=path).attempt == attempt.name
    except (OSError, TrainerError):
        return False


def publish(
    attempt: Attempt,
    written: Sequence[WrittenPiece],
    *,
    documents: Mapping[str, json_file.Document],
    aliases: Mapping[str, str],
    lock: FolderLock | None,
    begin_rename: BeginRename,
) -> bool:
    """Check that the pieces tile every tensor, write the JSON files and the manifest, sync, and rename. Rank 0 only.

    Args:
        begin_rename: called right before the rename; nothing is renamed if it raises.

    Returns:
        Whether the checkpoint, which is there, is durable: nothing is to be deleted for one that may not be.

    Raises:
        CheckpointError: if the pieces do not tile, the lock is lost, or the file system fails.
    """
    files, folder = attempt.folder.files, attempt.folder.partial(attempt.iteration, attempt.name)
    tensors = manifest.tile(attempt.layout, written)
    entries = {
        file.name: FileEntry(file.total_bytes, manifest.digest_of(file.header), is_tensor_file=True)
        for file in attempt.layout.files
    }
    try:
        for name, document in {INDEX: model_index(attempt.layout), **documents}.items():
            data = json_file.content(document)
            files.write_whole(folder / name, data)
            entries[name] = FileEntry(len(data), manifest.digest_of(data), is_tensor_file=False)
        data = manifest.to_bytes(Manifest(attempt.name, entries, tensors, aliases))
        files.write_whole(folder / MANIFEST, data)
        for path in sorted({(folder / name).parent for name in entries}, reverse=True):
            files.sync_folder(path)
        if lock is not None:
            lock.check()
        begin_rename()
        return attempt.folder.commit(attempt.iteration, attempt.name)
    except OSError as error:
        where = error.filename or folder
        raise CheckpointError(
            f"Committing a checkpoint failed: {error.strerror} (errno {error.errno})",
            where=where,
            expected=f"room for {attempt.layout.total_bytes} B",
            found=describe_free_space(files, attempt.folder.root),
            fix="Committed checkpoints are untouched; make room or mend the disk.",
        ) from error
