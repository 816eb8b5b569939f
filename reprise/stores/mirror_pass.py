"""Brings a store up to date with a run's checkpoint folder, by five rules.

One run per URL, claimed by an object. Only committed checkpoints, found by listing the folder. Data first, the manifest
last. The newest n stay. Nothing is deleted before all uploads are done, except checkpoints that the run has given up.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
from reprise.format.names import MANIFEST, STATE, STILL_MIRRORED
from reprise.storage import json_file
from reprise.storage.atomic import replace_file
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder, iteration_name, iteration_of
from reprise.storage.lock import is_locked
from reprise.storage.paths import read_regular
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.locations import ManifestVersion, manifest_version
from reprise.stores.path import by_checkpoint, store_path
from reprise.stores.upload import MARK, remove, upload

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

_log = logging.getLogger(__name__)

CLAIM = ".run"  # an object at a run's URL with the id of the run


class MirrorPass:
    """Passes over a checkpoint folder, one after the other.

    Args:
        folder: The run's checkpoint folder.

    Attributes:
        url: The run's URL in the store.
        refused: Digests of the checkpoints that the log has reported as not mirrored, by name.
    """

    def __init__(self, client: StoreClient, folder: Path, rule: MirrorRule) -> None:
        self._client, self.url, self._root, self._rule = client, store_path(rule.url), folder, rule
        self._stored = dict[str, MirroredCheckpoint]()  # the run's checkpoints, once surveyed
        self._is_surveyed = False
        self._run = ""  # which claims the URL
        self.refused = dict[str, str]()
        self._goes_on: bool | None = None  # as stored

    def run(self, *, at_end: bool = False) -> bool:
        """Upload one checkpoint, or its missing files. Return whether nothing is left to do.

        Args:
            at_end: Whether no later checkpoint follows.

        Raises:
            OSError: The store or the folder fails. The next call continues.
            CheckpointError: The URL belongs to another run.
        """
        local = self._local()
        self.refused = dict(self.refused.items() & local.items())
        if not local:
            return True  # nothing identifies the URL's run
        self._survey(local)
        for name in self._rule.due(local, self._stored, at_end=at_end):
            stored = self._stored.get(name)
            if local[name] not in (self.refused.get(name), stored and stored.digest):
                self._require_claim()
                self._tell(goes_on=True)
                self._upload(name, local[name])
                return False
        self._prune()
        self._tell(goes_on=not at_end and is_locked(self._root))
        return True

    def _local(self) -> dict[str, str]:
        """Return the manifest digests of the folder's committed checkpoints and weights-only saves, by name."""
        digests = dict[str, str]()
        for prefix in ("", f"{WEIGHTS}/"):
            for number in CheckpointFolder(self._root / prefix, FILE_SYSTEM).committed():
                name = f"{prefix}{iteration_name(number)}"
                version = manifest_version(self._root / name)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # retention has deleted it
                    digests |= {} if version is None else {name: _digest_at(self._root / name, version)}
        return digests

    def _survey(self, local: Mapping[str, str]) -> None:
        """List the store, at the first call. Delete checkpoints that the run has given up.

        The newest local checkpoint names the run and its branches.
        """
        newest = max(local, key=lambda name: (not is_weights(name), iteration_in(name)))
        lineage = _lineage_at(self._root / newest, local[newest])
        self._run = lineage.run or "unnamed"
        if not self._is_surveyed:
            listed = by_checkpoint(self._client.objects(self.url))
            checkpoints, recorded = dict[str, MirroredCheckpoint](), read_record(self._root, self._rule.url).committed
            for name, files in listed.items():
                if iteration_of(Path(name)) is not None and {MANIFEST, STATE} <= files.keys():
                    checkpoints[name] = recorded.get(name) or _stored_checkpoint(self._client, self.url / name)
            own = {name: entry for name, entry in checkpoints.items() if entry.lineage.run == lineage.run}
            self._require_claim(may_create=bool(own) or not checkpoints)
            for name in own:  # an upload may have stopped before this
                self._client.delete(self.url / name, [file for file in listed[name] if file.startswith(MARK)])
            self._write(own)
            for name in listed.keys() - checkpoints.keys() - {*self._rule.due(local, own)}:
                self._clear(name)
            self._is_surveyed = True
        for name, entry in self._stored.items():
            if lineage.branches and not lineage.admits(entry.lineage, iteration_in(name)):
                self._remove(name)
                _log.info("%s was deleted from %s: the run abandoned its branch", name, self.url)

    def _require_claim(self, *, may_create: bool = True) -> None:
        """Claim the URL for the run, unless it is claimed.

        Raises:
            CheckpointError: The URL belongs to another run.
        """
        place = self.url / CLAIM
        try:
            claim = self._client.read_text(place)
        except FileNotFoundError:
            claim = self._run if may_create and self._client.create(place, self._run) else "checkpoints of another"
        if claim != self._run:
            raise CheckpointError(
                "The URL already holds another run, which was not changed",
                where=self.url,
                expected=f"run {self._run}",
                found=claim,
                fix="Use a separate URL for each run.",
            )

    def _upload(self, name: str, digest: str) -> None:
        start, path = time.monotonic(), self._root / name
        try:
            lineage = _lineage_at(path, digest)
            content = CheckpointFiles.at(path)
            self._remove(name)  # saved again since
            upload(self._client, self.url / name, path, content)
        except FileNotFoundError:
            _log.info("%s was replaced or deleted: its upload is canceled", name)
            self._clear(name)
        except CheckpointError as error:
            _log.error("%s was not mirrored: %s", path, error)
            self.refused[name] = digest
            self._clear(name)
        else:
            self._write({**self._stored, name: MirroredCheckpoint(digest, lineage)})
            seconds, size = time.monotonic() - start, content.total_bytes
            _log.info("%s was uploaded to %s: %.1f MB in %.1f s", name, self.url, size / 1e6, seconds)

    def _prune(self) -> None:
        """Delete checkpoints beyond `keep`."""
        full = sorted((name for name in self._stored if not is_weights(name)), key=iteration_in)
        for name in full[: -self._rule.keep] if self._rule.keep else ():
            self._remove(name)

    def _clear(self, name: str) -> None:
        """Delete what an abandoned upload has left."""
        objects = self._client.objects(self.url / name)
        if MANIFEST not in objects and any(each.startswith(MARK) for each in objects):
            remove(self._client, self.url / name)

    def _remove(self, name: str) -> None:
        """Delete one of the run's checkpoints, if it is in the store."""
        if name in self._stored:
            remove(self._client, self.url / name)
            self._write({other: entry for other, entry in self._stored.items() if other != name})

    def _tell(self, *, goes_on: bool) -> None:
        """Keep an object at the URL while more checkpoints may come: a follower waits for them."""
        if goes_on is not self._goes_on:
            if goes_on:
                self._client.create(self.url / STILL_MIRRORED, "")
            else:
                self._client.delete(self.url, [STILL_MIRRORED])
            self._goes_on = goes_on

    def _write(self, stored: dict[str, MirroredCheckpoint]) -> None:
        replace_file(FILE_SYSTEM, self._root / MIRROR, MirrorRecord(self._rule, stored).to_bytes())
        self._stored = stored


def _stored_checkpoint(client: StoreClient, folder: Path) -> MirroredCheckpoint:
    """Return the checkpoint in a store folder."""
    manifest, state = (client.read_text(folder / name).encode() for name in (MANIFEST, STATE))
    lineage = saved_lineage(json_file.parse(state, where=folder / STATE), where=folder / STATE)
    return MirroredCheckpoint(xxhash.xxh3_64_hexdigest(manifest), lineage)


@functools.cache
def _digest_at(path: Path, _version: ManifestVersion) -> str:
    return xxhash.xxh3_64_hexdigest(read_regular(path / MANIFEST))


@functools.cache
def _lineage_at(path: Path, _digest: str) -> Lineage:
    return saved_lineage(json_file.read(path / STATE), where=path / STATE)
