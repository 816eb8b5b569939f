"""A mirror's record, `mirror.json` in a run's checkpoint folder, and its rule for choosing checkpoints.

Names are folder names within a run: `iter_0000100`, `weights/iter_0000100`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from reprise.errors import TrainerError
from reprise.format.lineage import Lineage
from reprise.format.names import MANIFEST
from reprise.storage import json_file
from reprise.storage.folder import WEIGHTS, iteration_name, iteration_of
from reprise.storage.json_file import Json
from reprise.storage.paths import read_regular

MIRROR = "mirror.json"
FORMAT = "reprise-mirror/1"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MirroredCheckpoint:
    """A checkpoint in a store.

    Args:
        digest: Its manifest's digest.
        lineage: Its run's lineage at the save. Without branches if the writer recorded none.
    """

    digest: str
    lineage: Lineage = Lineage()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class MirrorRule:
    """Chooses the checkpoints to upload: every weights-only save, and full checkpoints by interval.

    Args:
        url: The run's URL in the store.
        interval: Upload multiples of this iteration only. 0 uploads every checkpoint. A run's last is always uploaded.
        keep: How many of the newest full checkpoints to keep in the store. 0 keeps all.
        prefix: Name prefix before the iteration folders, for `unmirrored`.
    """

    url: str
    interval: int = 0
    keep: int = 0
    prefix: str = ""

    def due(self, names: Iterable[str], stored: Iterable[str], *, at_end: bool = False) -> list[str]:
        """Return the names required in the store, newest first, full checkpoints before weights-only saves.

        The newest goes first: with it in the store, losing the shared folder costs the least.

        Args:
            names: The checkpoints in the run's folder.
            stored: The checkpoints in the store, which count for `keep` too.
            at_end: Whether no later checkpoint follows. The newest is then due at any iteration.
        """
        newest_first = sorted(names, key=iteration_in, reverse=True)
        full, weights = [name for name in newest_first if not is_weights(name)], list(filter(is_weights, newest_first))
        step = self.interval or 1
        taken = [name for name in full if iteration_in(name) % step == 0 or (at_end and name == full[0])]
        if self.keep:
            newest = sorted({*taken, *(name for name in stored if not is_weights(name))}, key=iteration_in)
            taken = [name for name in taken if name in newest[-self.keep :]]
        return [*taken, *weights]

    def unmirrored(
        self, root: Path, committed: Iterable[int], candidates: Iterable[int], *, at_end: bool = False
    ) -> list[int]:
        """Return the iterations among `candidates` required in the store and, by its record, absent.

        Args:
            root: The folder holding these iterations.
            committed: All iterations in the folder.
            at_end: See `due`.
        """
        folder = root.parent if self.prefix else root
        record = read_record(folder, self.url)
        names = {iteration: f"{self.prefix}{iteration_name(iteration)}" for iteration in committed}
        due = set(self.due(names.values(), record.committed, at_end=at_end))
        return [
            iteration
            for iteration in candidates
            if names[iteration] in due and not _has(record, names[iteration], root / iteration_name(iteration))
        ]


@dataclass(frozen=True, slots=True)
class MirrorRecord:
    """A mirror's state: its rule, and the run's complete checkpoints in the store, by name."""

    rule: MirrorRule
    committed: Mapping[str, MirroredCheckpoint] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the `mirror.json` bytes."""
        committed = {
            name: {"digest": entry.digest, "run": entry.lineage.record() if entry.lineage.branches else None}
            for name, entry in sorted(self.committed.items())
        }
        rule = self.rule
        members = {"url": rule.url, "committed": committed, "interval": rule.interval, "keep": rule.keep}
        return json_file.sealed({"format": FORMAT, **members})


def is_weights(name: str) -> bool:
    """Return whether a name belongs to a weights-only save."""
    return name.startswith(f"{WEIGHTS}/")


def iteration_in(name: str) -> int:
    """Return the iteration in a name."""
    iteration = iteration_of(Path(name))
    assert iteration is not None
    return iteration


def read_record(folder: Path, url: str) -> MirrorRecord:
    """Return the record in a checkpoint folder, or an empty record if it is missing, damaged or for another URL."""
    try:
        record = from_bytes(read_regular(folder / MIRROR, limit_bytes=_MOST_BYTES), where=folder / MIRROR)
    except (OSError, ValueError, TrainerError):
        return MirrorRecord(MirrorRule(url))
    return record if record.rule.url == url else MirrorRecord(MirrorRule(url))


def from_bytes(data: bytes, *, where: object) -> MirrorRecord:
    """Parse and check a `mirror.json`.

    Raises:
        MismatchError: It has another format version.
        CheckpointError: It is damaged or malformed.
    """
    fix = "Run `reprise checkpoint mirror`: it rebuilds the record from the store."
    return json_file.unsealed(data, _from_table, kind="record of a mirror", form=FORMAT, where=where, fix=fix)


def _from_table(table: Json) -> MirrorRecord:
    committed = {
        _name(name): MirroredCheckpoint(
            str(entry["digest"]), Lineage() if entry["run"] is None else Lineage.from_record(entry["run"])
        )
        for name, entry in table["committed"].items()
    }
    interval, keep = (json_file.integer(table.get(member, 0)) for member in ("interval", "keep"))
    return MirrorRecord(MirrorRule(str(table["url"]), interval, keep), committed)


def _name(name: str) -> str:
    if iteration_of(Path(name)) is None or name.removeprefix(f"{WEIGHTS}/") != Path(name).name:
        raise ValueError(f"{name!r} is not a checkpoint name")
    return name


def _has(record: MirrorRecord, name: str, path: Path) -> bool:
    """Return whether the store has the checkpoint at `path`, as it is or as it was with its optimizer state."""
    entry = record.committed.get(name)
    try:
        return entry is not None and xxhash.xxh3_64_hexdigest(read_regular(path / MANIFEST)) == entry.digest
    except OSError:
        return False
