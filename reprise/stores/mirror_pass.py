"""Brings a store up to the checkpoints of a run's folder: what the folder has committed, the store gets.

The folder is followed by its listing alone. So nothing is lost while the store or this process is away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from reprise import json_file
from reprise.atomic import replace_file
from reprise.errors import CheckpointError, count_of
from reprise.format.lineage import Lineage, saved_lineage
from reprise.format.mirror_record import (
    MIRROR,
    MirroredCheckpoint,
    MirrorRecord,
    MirrorRule,
    is_weights,
    iteration_in,
    read_record,
)
from reprise.format.names import HOST, MANIFEST, STATE, STILL_MIRRORED
from reprise.paths import exists, matching
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder, iteration_name, iteration_of
from reprise.storage.lock import is_locked
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.client import StoreClient
from reprise.stores.holds import is_held
from reprise.stores.upload import (
    LocalSource,
    OvertakenError,
    SourceChangedError,
    Upload,
    clear,
    list_folder,
    remove_marks,
    retire,
    supersede,
)
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

# Host 0 uploads in the place of a host that has uploaded nothing for this long, and for the time that its largest
# missing file takes at this speed.
STALL_S = 300.0
SLOWEST_BYTES_PER_S = 8 << 20
_OF_PARTS = "`reprise checkpoint gather FOLDER... OUT` makes a whole one of the folders of all hosts"


@dataclass(slots=True)
class _Waiting:
    """The files of a checkpoint awaited by host 0, and since when no other is missing."""

    name: str
    missing: list[str]
    since: float


class MirrorPass:
    """The passes over a checkpoint folder, one after the other.

    Args:
        url: of the run in the store.
        folder: the run's checkpoint folder, which all hosts share.
        host: the number of this host among `hosts`. Host 0 begins, commits, deletes and writes `mirror.json`.
    """

    def __init__(
        self,
        client: StoreClient,
        url: StoreUrl,
        folder: Path,
        rule: MirrorRule,
        *,
        host: int = 0,
        hosts: int = 1,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._url, self._root, self._rule = client, url, folder, rule
        self._host, self._hosts = host, hosts
        self._stall_s, self._clock = stall_s, clock
        self._record: MirrorRecord | None = None
        self._lineage = ("", ""), Lineage()  # of the newest checkpoint, by its name and digest
        self._sources = dict[str, tuple[tuple[int, ...], CheckpointFiles]]()
        self._uploads = dict[str, Upload]()
        self._inherited = frozenset[str]()  # of the run with which this one began: they stay as they are
        self._ended = set[tuple[str, str]]()  # by name and digest: this host's share is up, or cannot be uploaded
        self._refused = set[str]()  # names of checkpoints that are not mirrored
        self._waiting: _Waiting | None = None
        self._kept = set[str]()  # names that a hold in the store keeps, as the log says
        self._goes_on: bool | None = None  # as the store has it; None if unknown

    @property
    def refused(self) -> frozenset[str]:
        """Return the names of the folder's checkpoints of which the log says that the store does not have them."""
        return frozenset(self._refused | self._kept)

    def run(self, *, at_end: bool = False) -> bool:
        """Upload one checkpoint, or what the store lacks of it; return whether nothing is left to do for this host.

        Args:
            at_end: whether no later checkpoint follows.

        Raises:
            OSError: if the store or the folder fails; the next call goes on.
            CheckpointError: if the store holds checkpoints of another run.
        """
        local = self._local()
        self._sources = {name: found for name, found in self._sources.items() if name in local}
        self._refused &= local.keys()
        self._kept &= local.keys()
        if self._host == 0:
            self._lead(local)
        record = self._record if self._host == 0 and self._record else read_record(self._root, self._rule.url)
        due = self._rule.due(local, record.committed, at_end=at_end)
        for name in due:
            files = self._files(name, local[name])
            if files is None or (name, files.digest) in self._ended:
                continue
            entry = record.committed.get(name)
            if entry is not None and entry.digest == files.digest:
                self._refused.discard(name)
                self._kept.discard(name)
                continue
            if entry is not None and self._is_kept(name, entry):
                continue
            self._tell(goes_on=True)
            self._send(name, local[name], files)
            return False
        if self._host == 0:
            self._prune(local, at_end=at_end)
            self._tell(goes_on=not at_end and is_locked(self._root))
        return True

    def _tell(self, *, goes_on: bool) -> None:
        """Keep an object at the URL for as long as checkpoints of the run may come: a follower waits for them."""
        if self._host or self._record is None or goes_on is self._goes_on:
            return
        key = self._url.child(STILL_MIRRORED).key
        if goes_on:
            self._client.put(key, b"")
        else:
            self._client.delete([key])
        self._goes_on = goes_on

    def _local(self) -> dict[str, Path]:
        """Return the committed checkpoints of the folder, and its saves of the weights alone, by name."""
        table = dict[str, Path]()
        for prefix, root in (("", self._root), (f"{WEIGHTS}/", self._root / WEIGHTS)):
            folder = CheckpointFolder(root, FILE_SYSTEM)
            table |= {f"{prefix}{iteration_name(number)}": folder.iteration(number) for number in folder.committed()}
        return table

    def _files(self, name: str, path: Path) -> CheckpointFiles | None:
        """Return the files of a checkpoint; None if it is gone, or unfit for an upload."""
        try:
            status = (path / MANIFEST).stat()
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if name not in self._sources or self._sources[name][0] != version:
                self._sources[name] = version, LocalSource(path).files
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CheckpointError as error:
            self._give_up(name, "", error)
            return None
        return self._sources[name][1]

    def _send(self, name: str, path: Path, files: CheckpointFiles) -> None:
        if exists(path / HOST):
            self._give_up(name, files.digest, f"it is the part of one host. {_OF_PARTS}")
            return
        try:
            source = LocalSource(path)
        except FileNotFoundError:
            return
        upload = self._uploads.get(name)
        if upload is None or upload.files.digest != files.digest:
            folder = self._url.child(name)
            upload = Upload(self._client, folder, source, files, host=self._host, hosts=self._hosts)
            self._uploads = {name: upload}
        try:
            if self._host:
                self._help(name, upload)
            else:
                self._lead_upload(name, path, upload)
        except SourceChangedError:
            self._uploads.clear()
            _log.info("%s is replaced or deleted, its upload is given up", name)
        except CheckpointError as error:
            self._give_up(name, files.digest, error)

    def _help(self, name: str, upload: Upload) -> None:
        """Upload the share of a host other than the first, once the first has begun."""
        if upload.has_begun():
            upload.send()
            self._ended.add((name, upload.files.digest))

    def _lead_upload(self, name: str, path: Path, upload: Upload) -> None:
        record, start = self._known, self._clock()
        entry = record.committed.get(name)
        if name in self._inherited:
            raise self._foreign(name)
        if entry is None and upload.has_another():  # which was not there at the survey
            self._leave(name)
            raise self._contended(name)
        if name not in record.partial:
            self._write(replace(record, partial=record.partial | {name}, superseded=record.superseded - {name}))
        if entry is not None and not self._is_of_branch_given_up(name, entry):
            if not retire(self._client, self._url.child(name)):  # a hold has come meanwhile
                self._write(replace(self._known, partial=self._known.partial - {name}))
                return
            self._forget(name)
        try:
            if upload.begin(replaces=name in self._known.committed):
                self._forget(name)  # not before: a request that fails until then is made again as a replacement
                upload.send()
                missing = upload.missing()
                if missing and not self._is_stalled(name, missing, upload.files):
                    return
                if missing:
                    files = count_of(len(missing), "file")
                    _log.warning("%s: host 0 uploads %s in the place of other hosts", name, files)
                    upload.send(missing)
                upload.commit()
        except OvertakenError:
            self._leave(name)
            raise
        entry = MirroredCheckpoint(upload.files.digest, _lineage_at(path / STATE))
        record = self._known
        self._write(replace(record, committed={**record.committed, name: entry}, partial=record.partial - {name}))
        self._uploads.clear()
        self._refused.discard(name)  # of an earlier digest
        self._waiting = None
        seconds, size = self._clock() - start, upload.files.total_bytes
        _log.info("%s is in %s: %.1f MB in %.1f s", name, self._url, size / 1e6, seconds)

    def _is_kept(self, name: str, entry: MirroredCheckpoint) -> bool:
        """Return whether a hold in the store keeps a checkpoint there, in whose place the folder has another."""
        if self._is_of_branch_given_up(name, entry) or not self._is_held(name):
            self._kept.discard(name)
            return False
        if name not in self._kept and self._host == 0:
            _log.info(
                "%s stays in %s as it is: a hold there keeps it; that of the folder goes once the hold is gone",
                name,
                self._url,
            )
        self._kept.add(name)
        return True

    def _is_held(self, name: str) -> bool:
        folder = self._url.child(name)
        return is_held(self._client, folder, list_folder(self._client, folder))

    def _is_of_branch_given_up(self, name: str, entry: MirroredCheckpoint) -> bool:
        return _relation(self._lineage[1], entry.lineage, iteration_in(name)) is _Relation.GIVEN_UP

    def _is_stalled(self, name: str, missing: list[str], files: CheckpointFiles) -> bool:
        """Return whether other hosts have uploaded nothing for too long."""
        now = self._clock()
        if self._waiting is None or (self._waiting.name, self._waiting.missing) != (name, missing):
            self._waiting = _Waiting(name, missing, now)
        largest_s = files.sizes[missing[0]] / SLOWEST_BYTES_PER_S
        return now - self._waiting.since > self._stall_s + largest_s

    def _give_up(self, name: str, digest: str, reason: object) -> None:
        if (name, digest) not in self._ended:
            _log.error("%s is not mirrored: %s", self._root / name, reason)
        self._ended.add((name, digest))
        self._refused.add(name)

    def _lead(self, local: Mapping[str, Path]) -> None:
        """Compare record and store once, and take back the commits of iterations given up by the run."""
        lineage = self._newest_lineage(local)
        if lineage is None:  # nothing is saved yet, so nothing tells the run's own checkpoints in the store
            return
        if self._record is None:
            self._write(self._surveyed(lineage))
        for name, entry in dict(self._known.committed).items():
            if name not in local and self._is_given_up(name, entry):
                self._write(replace(self._known, superseded=self._known.superseded | {name}))
                supersede(self._client, self._url.child(name))
                self._forget(name)
                _log.info("%s, which the run has given up, is no checkpoint of %s any more", name, self._url)

    def _newest_lineage(self, local: Mapping[str, Path]) -> Lineage | None:
        """Return the lineage of the newest checkpoint, cached by its digest; None without a checkpoint."""
        for name in sorted(local, key=lambda name: (not is_weights(name), iteration_in(name)), reverse=True):
            files = self._files(name, local[name])
            if files is not None:
                if self._lineage[0] != (name, files.digest):
                    self._lineage = (name, files.digest), _lineage_at(local[name] / STATE)
                return self._lineage[1]
        return None

    def _surveyed(self, lineage: Lineage) -> MirrorRecord:
        """Return the record of the checkpoints really in the store.

        Raises:
            CheckpointError: if it has checkpoints of another run.
        """
        record, committed = read_record(self._root, self._rule.url), dict[str, MirroredCheckpoint]()
        inherited = set[str]()
        for prefix in ("", f"{WEIGHTS}/"):
            folder = self._url.child(WEIGHTS) if prefix else self._url
            for folder_name in filter(_is_current_name, self._client.names(folder.key)[0]):
                name = f"{prefix}{folder_name}"
                entry = _stored_checkpoint(self._client, self._url.child(name), record.committed.get(name))
                if entry is None:
                    continue
                relation = _relation(lineage, entry.lineage, iteration_in(name))
                if relation is _Relation.FOREIGN:
                    raise self._foreign(name, f"run {entry.lineage.run}")
                if relation is _Relation.INHERITED:
                    inherited.add(name)
                    continue
                if name in record.partial:  # an upload that ended between its commit and the record
                    remove_marks(self._client, self._url.child(name))
                committed[name] = entry
        self._inherited = frozenset(inherited)
        stored = committed.keys() | inherited
        partial, superseded = record.partial - stored, record.superseded - stored
        return replace(
            record,
            committed=committed,
            partial=partial,
            superseded=superseded,
            interval=self._rule.interval,
            keep=self._rule.keep,
        )

    def _foreign(self, name: str, found: str = "one with which this run began") -> CheckpointError:
        return CheckpointError(
            "The store holds a checkpoint of another run, which is not touched",
            where=self._url.child(name),
            expected=f"run {self._lineage[1].run}",
            found=found,
            fix="Give each run a URL of its own.",
        )

    def _leave(self, name: str) -> None:
        """Delete nothing of an upload any more: the place has objects of another run."""
        if name in self._known.partial:
            self._write(replace(self._known, partial=self._known.partial - {name}))
        self._forget(name)

    def _contended(self, name: str) -> CheckpointError:
        return CheckpointError(
            "Another run uploads into the same place of a store",
            where=self._url.child(name),
            expected="checkpoints of this run alone",
            found="a checkpoint that has appeared there and is not of this run's folder",
            fix="End one of the two runs, or give it a URL of its own.",
        )

    def _is_given_up(self, name: str, entry: MirroredCheckpoint) -> bool:
        """Return whether the run has given up a checkpoint absent from its folder; retention may have deleted it."""
        if self._is_of_branch_given_up(name, entry):
            return True
        path = self._root / name
        for superseded in matching(path.parent, f"{path.name}.superseded-*"):
            try:
                if LocalSource(superseded).files.digest == entry.digest:
                    return True
            except (OSError, CheckpointError):
                continue
        return False

    def _prune(self, local: Mapping[str, Path], *, at_end: bool) -> None:
        """Delete the checkpoints beyond `mirror_keep`, and the files of uploads given up."""
        if self._record is None:
            return
        full = sorted((name for name in self._record.committed if not is_weights(name)), key=iteration_in)
        for name in full[: -self._rule.keep] if self._rule.keep else ():
            folder, is_gone = self._url.child(name), False
            if not self._is_held(name):
                self._write(replace(self._known, partial=self._known.partial | {name}))
                is_gone = retire(self._client, folder)
            if is_gone:
                self._forget(name)
            else:  # also of an earlier pass that failed in between: what is partial is deleted
                self._write(replace(self._known, partial=self._known.partial - {name}))
        due = set(self._rule.due(local, self._known.committed, at_end=at_end))
        for name in sorted(self._known.partial - due):
            self._settle(name)
        for name in sorted(self._known.superseded) if self._rule.keep else ():
            clear(self._client, list_folder(self._client, self._url.child(name)))
            self._write(replace(self._known, superseded=self._known.superseded - {name}))

    def _settle(self, name: str) -> None:
        """Delete the files of an upload given up, unless they are a checkpoint.

        Its upload has ended before the record says so, or a replacement has not begun; or another run has come.
        """
        folder, record = self._url.child(name), self._known
        entry = _stored_checkpoint(self._client, folder, record.committed.get(name))
        if entry is None:
            clear(self._client, list_folder(self._client, folder))
            self._forget(name)
        elif _relation(self._lineage[1], entry.lineage, iteration_in(name)) is _Relation.OWN:
            remove_marks(self._client, folder)
            self._write(replace(record, committed={**record.committed, name: entry}))
        self._write(replace(self._known, partial=self._known.partial - {name}))

    def _forget(self, name: str) -> None:
        """Take a checkpoint no longer in the store out of the record. Its files are in the record already."""
        committed = {other: entry for other, entry in self._known.committed.items() if other != name}
        self._write(replace(self._known, committed=committed))

    @property
    def _known(self) -> MirrorRecord:
        assert self._record is not None
        return self._record

    def _write(self, record: MirrorRecord) -> None:
        if record != self._record:
            replace_file(FILE_SYSTEM, self._root / MIRROR, record.to_bytes())
            self._record = record


class _Relation(Enum):
    """What a checkpoint in the store is to a run."""

    OWN = auto()
    INHERITED = auto()
    GIVEN_UP = auto()
    FOREIGN = auto()


def _relation(current: Lineage, saved: Lineage, iteration: int) -> _Relation:
    if not current.branches:
        return _Relation.FOREIGN if saved.branches else _Relation.OWN
    if current.admits(saved, iteration):
        return _Relation.OWN
    parent = current.parent
    if parent is not None and saved.run is not None and saved.run == parent.run and iteration <= parent.iteration:
        return _Relation.INHERITED  # the run began with a checkpoint of this URL
    return _Relation.GIVEN_UP if saved.run == current.run else _Relation.FOREIGN


def _is_current_name(name: str) -> bool:
    return iteration_of(Path(name)) is not None


def _stored_checkpoint(
    client: StoreClient, folder: StoreUrl, recorded: MirroredCheckpoint | None
) -> MirroredCheckpoint | None:
    """Return the checkpoint in a folder of the store; None if it is not committed."""
    try:
        size = client.head(folder.child(MANIFEST).key).size
        if recorded is not None:
            return recorded
        manifest = bytes(client.read(folder.child(MANIFEST).key, 0, size))
        state = bytes(client.read(folder.child(STATE).key, 0, client.head(folder.child(STATE).key).size))
    except FileNotFoundError:
        return None
    files = CheckpointFiles.parse(manifest, where=folder.child(MANIFEST))
    lineage = saved_lineage(json_file.parse(state, where=folder.child(STATE)), where=folder.child(STATE))
    return MirroredCheckpoint(files.digest, lineage)


def _lineage_at(path: Path) -> Lineage:
    return saved_lineage(json_file.read(path), where=path)
