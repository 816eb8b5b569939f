"""Brings a store up to date with a run's checkpoint folder, by five rules.

One run per URL, claimed by an object. Only committed checkpoints, found by listing the folder. Data first, the manifest
last. The newest n stay. Nothing is deleted before all uploads are done, except checkpoints that the run has given up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import xxhash

from reprise.errors import CheckpointError
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
from reprise.storage import json_file
from reprise.storage.atomic import replace_file
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder, iteration_name, iteration_of
from reprise.storage.lock import is_locked
from reprise.storage.paths import exists, read_regular
from reprise.stores.client import StoreClient
from reprise.stores.holds import ManifestVersion
from reprise.stores.path import by_checkpoint
from reprise.stores.upload import MARK, SourceChangedError, Upload, remove
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

CLAIM = ".run"  # an object at a run's URL with the id of the run
_PREFIXES = "", f"{WEIGHTS}/"  # before the names of full checkpoints and weights-only saves
_OF_PARTS = "it is the part of one host. `reprise checkpoint gather FOLDER... OUT` makes a whole one of all hosts'"


class MirrorPass:
    """Passes over a checkpoint folder, one after the other.

    Args:
        url: The run's URL in the store.
        folder: The run's checkpoint folder, which all hosts share.
        host: This host's number among `hosts`. Host 0 claims, commits, deletes and writes `mirror.json`.
    """

    def __init__(
        self, client: StoreClient, url: StoreUrl, folder: Path, rule: MirrorRule, *, host: int = 0, hosts: int = 1
    ) -> None:
        self._client, self._url, self._root, self._rule = client, url, folder, rule
        self._host, self._hosts = host, hosts
        self._committed: Mapping[str, MirroredCheckpoint] | None = None  # in the store, once host 0 has surveyed it
        self._run: str | None = None  # which claims the URL
        # Digests by name: on host 0, of checkpoints reported as not mirrored; elsewhere, of those whose share is up.
        self._settled = dict[str, str]()
        self._unfinished = set[str]()  # folders in the store that may lack a manifest
        self._goes_on: bool | None = None  # as stored

    @property
    def refused(self) -> frozenset[str]:
        """Return the checkpoints, by name, that host 0's log has reported as not mirrored."""
        return frozenset(self._settled)

    def run(self, *, at_end: bool = False) -> bool:
        """Upload one checkpoint, or its missing files. Return whether this host has nothing left to do.

        Args:
            at_end: Whether no later checkpoint follows.

        Raises:
            OSError: The store or the folder fails. The next call continues.
            CheckpointError: The URL belongs to another run.
        """
        local = self._local()
        self._settled = dict(self._settled.items() & local.items())
        if self._host == 0:
            if not local:
                return True  # nothing identifies the URL's run
            self._learn(local)
        stored = self._stored
        for name in self._rule.due(local, stored, at_end=at_end):
            if local[name] in (self._settled.get(name), name in stored and stored[name].digest):
                continue
            if self._host == 0:
                self._require_claim()
                self._tell(goes_on=True)
            self._upload(name, local[name])
            return False
        if self._host == 0:
            self._prune()
            self._tell(goes_on=not at_end and is_locked(self._root))
        return True

    def _local(self) -> dict[str, str]:
        """Return the manifest digests of the folder's committed checkpoints and weights-only saves, by name."""
        digests = dict[str, str]()
        for prefix in _PREFIXES:
            for number in CheckpointFolder(self._root / prefix, FILE_SYSTEM).committed():
                name = f"{prefix}{iteration_name(number)}"
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # retention has deleted it
                    digests[name] = _digest(self._root / name)
        return digests

    def _learn(self, local: Mapping[str, str]) -> None:
        """Read the newest checkpoint's run and, once, the store's content. Delete given-up checkpoints."""
        newest = max(local, key=lambda name: (not is_weights(name), iteration_in(name)))
        lineage = _lineage_at(self._root / newest, local[newest])
        self._run = lineage.run
        if self._committed is None:
            self._write(self._surveyed())
        for name, entry in self._stored.items():
            if lineage.branches and not lineage.admits(entry.lineage, iteration_in(name)):
                self._remove(name)
                _log.info("%s was deleted from %s: the run abandoned its branch", name, self._url)

    def _surveyed(self) -> dict[str, MirroredCheckpoint]:
        """Return this run's checkpoints actually in the store, from a single listing."""
        recorded, is_foreign = self._stored, False
        committed = dict[str, MirroredCheckpoint]()
        for name, files in by_checkpoint(self._client.objects(self._url)).items():
            if iteration_of(Path(name)) is None or not {MANIFEST, STATE} <= files.keys():
                self._unfinished.add(name)
                continue
            entry = recorded.get(name) or _stored_checkpoint(self._client, self._url.child(name))
            if entry.lineage.run == self._run:
                committed[name] = entry
                marks = [file for file in files if file.startswith(MARK)]
                self._client.delete(self._url.child(name), marks)  # its upload may have stopped before this
            else:
                is_foreign = True
        self._require_claim(is_foreign=is_foreign and not committed)
        return committed

    def _require_claim(self, *, is_foreign: bool = False) -> None:
        """Claim the URL for the run, unless it is claimed.

        Args:
            is_foreign: Whether it has only other runs' checkpoints.

        Raises:
            CheckpointError: The URL belongs to another run.
        """
        run, place = self._run or "unnamed", self._url.child(CLAIM)
        try:
            claim = self._client.read_text(place)
        except FileNotFoundError:
            claim = run if not is_foreign and self._client.create(place, run) else "checkpoints of another"
        if claim != run:
            raise CheckpointError(
                "The URL already holds another run, which was not changed",
                where=self._url,
                expected=f"run {run}",
                found=claim,
                fix="Use a separate URL for each run.",
            )

    def _upload(self, name: str, digest: str) -> None:
        start, path = time.monotonic(), self._root / name
        self._unfinished.add(name)
        try:
            lineage = _lineage_at(path, digest)
            if exists(path / HOST):
                raise CheckpointError(_OF_PARTS)
            if self._host == 0 and name in self._stored:
                self._remove(name)  # saved again since
            upload = Upload(self._client, self._url.child(name), path, host=self._host, hosts=self._hosts)
            is_up = upload.run()
        except (SourceChangedError, FileNotFoundError):
            _log.info("%s was replaced or deleted: its upload is canceled", name)
        except CheckpointError as error:
            _log.error("%s was not mirrored: %s", path, error)
            if self._host == 0:  # other hosts retry: the first waits for their share
                self._settled[name] = digest
        else:
            if is_up and self._host:
                self._settled[name] = digest
            elif is_up:
                self._write({**self._stored, name: MirroredCheckpoint(digest, lineage)})
                seconds, size = time.monotonic() - start, upload.files.total_bytes
                _log.info("%s was uploaded to %s: %.1f MB in %.1f s", name, self._url, size / 1e6, seconds)

    def _prune(self) -> None:
        """Delete checkpoints beyond `keep`, and remains of abandoned uploads."""
        full = sorted((name for name in self._stored if not is_weights(name)), key=iteration_in)
        for name in full[: -self._rule.keep] if self._rule.keep else ():
            self._remove(name)
        for name in sorted(self._unfinished - self._stored.keys()):
            objects = self._client.objects(self._url.child(name))
            if MANIFEST not in objects and any(other.startswith(MARK) for other in objects):
                remove(self._client, self._url.child(name))
        self._unfinished.clear()

    def _remove(self, name: str) -> None:
        remove(self._client, self._url.child(name))
        self._write({other: entry for other, entry in self._stored.items() if other != name})

    def _tell(self, *, goes_on: bool) -> None:
        """Keep an object at the URL while more checkpoints may come: a follower waits for them."""
        if goes_on is not self._goes_on:
            if goes_on:
                self._client.create(self._url.child(STILL_MIRRORED), "")
            else:
                self._client.delete(self._url, [STILL_MIRRORED])
            self._goes_on = goes_on

    @property
    def _stored(self) -> Mapping[str, MirroredCheckpoint]:
        """Return the run's checkpoints in the store, by its record elsewhere than on host 0."""
        return read_record(self._root, self._rule.url).committed if self._committed is None else self._committed

    def _write(self, committed: Mapping[str, MirroredCheckpoint]) -> None:
        if committed != self._committed:
            replace_file(FILE_SYSTEM, self._root / MIRROR, MirrorRecord(self._rule, committed).to_bytes())
            self._committed = committed


def _stored_checkpoint(client: StoreClient, folder: StoreUrl) -> MirroredCheckpoint:
    """Return the checkpoint in a store folder."""
    manifest, state = (client.read_text(folder.child(name)).encode() for name in (MANIFEST, STATE))
    lineage = saved_lineage(json_file.parse(state, where=folder.child(STATE)), where=folder.child(STATE))
    return MirroredCheckpoint(xxhash.xxh3_64_hexdigest(manifest), lineage)


def _digest(path: Path) -> str:
    """Return a checkpoint manifest's digest."""
    status = os.stat(path / MANIFEST)
    return _digest_of(path / MANIFEST, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@functools.cache
def _digest_of(path: Path, _version: ManifestVersion) -> str:
    return xxhash.xxh3_64_hexdigest(read_regular(path))


@functools.cache
def _lineage_at(path: Path, _digest: str) -> Lineage:
    return saved_lineage(json_file.read(path / STATE), where=path / STATE)
