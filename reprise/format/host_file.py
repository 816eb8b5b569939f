"""`host.json`: which checkpoint pieces lie in a host's folder.

A local checkpoint has a folder on each host, all with the same manifest and the same files at their full size. Only
the listed pieces' ranges hold data. Every other range is a hole and must not be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reprise.errors import CheckpointError, first_of
from reprise.format.layout import integers
from reprise.format.manifest import digest_of
from reprise.format.names import HOST, MANIFEST
from reprise.storage import json_file
from reprise.storage.json_file import integer
from reprise.storage.paths import exists, lexists, read_regular

FORMAT = "reprise-host/1"
# A folder with missing pieces stores its model or adapter configuration under another name: transformers and PEFT
# refuse a folder without the usual name, and would read holes as zeros in a folder with it.
_CONFIGS, _OF_PART = ("config.json", "adapter_config.json"), ".part"

# By tensor: piece numbers, in `TensorEntry.pieces` order. A tensor without pieces is absent.
PieceNumbers = Mapping[str, tuple[int, ...]]


class Parts(NamedTuple):
    """A checkpoint's parts in a folder. A part is everything that one host's ranks wrote in a save.

    Args:
        manifest: The manifest's digest, the same in every folder with the checkpoint.
        hosts: The names of the saving hosts.
        whole: The numbers of the hosts whose part is in the folder.
    """

    manifest: str
    hosts: Sequence[str]
    whole: Collection[int]

    @property
    def missing(self) -> list[str]:
        """Return the hosts whose part is missing in the folder."""
        return [name for number, name in enumerate(self.hosts) if number not in self.whole]

    def describe_missing(self) -> str:
        """Return the missing parts in words. Empty if there are none."""
        names = self.missing
        return f"{len(names)} of {len(self.hosts)} parts: {first_of(names, 3)}" if names else ""


@dataclass(frozen=True, slots=True)
class HostFile:
    """The parsed `host.json`.

    Args:
        attempt: The save attempt's name.
        manifest: The manifest's digest.
        host: The number that this folder's host has in the save. None for a folder with copies alone.
        hosts: The names of all hosts in the save.
        writers: By tensor, each piece's host number.
        held: The pieces in this folder: its own host's, and copies from other hosts.
    """

    attempt: str
    manifest: str
    host: int | None
    hosts: tuple[str, ...]
    writers: PieceNumbers
    held: PieceNumbers

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return the pieces outside this folder."""
        return without(self.pieces, self.held)

    @property
    def parts(self) -> Parts:
        """Return the parts in this folder: those whose pieces all lie here are whole."""
        numbers = set(range(len(self.hosts))) - self.by_host(self.missing).keys()
        return Parts(self.manifest, self.hosts, sorted(numbers))

    @property
    def is_whole(self) -> bool:
        """Return whether every piece lies in this folder."""
        return not self.missing

    @property
    def pieces(self) -> dict[str, tuple[int, ...]]:
        """Return every piece in the checkpoint."""
        return {name: tuple(range(len(hosts))) for name, hosts in self.writers.items()}

    def written_by(self, host: int) -> dict[str, tuple[int, ...]]:
        """Return a host's pieces."""
        return self.by_host(self.pieces).get(host, {})

    def by_host(self, pieces: PieceNumbers) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return pieces grouped by the host number that wrote them."""
        groups: dict[int, dict[str, list[int]]] = {}
        for name, numbers in pieces.items():
            for number in numbers:
                groups.setdefault(self.writers[name][number], {}).setdefault(name, []).append(number)
        return {host: {name: tuple(group[name]) for name in group} for host, group in sorted(groups.items())}

    def to_bytes(self) -> bytes:
        """Return the JSON form. Its last member is the digest of all bytes before that member's comma."""
        return json_file.sealed(
            {
                "format": FORMAT,
                "attempt": self.attempt,
                "manifest_xxh3_64": self.manifest,
                "host": self.host,
                "hosts": list(self.hosts),
                "writers": {name: list(numbers) for name, numbers in self.writers.items()},
                "held": {name: list(numbers) for name, numbers in self.held.items()},
            }
        )


def stored_name(name: str, *, is_whole: bool) -> str:
    """Return a manifest file's name in a host's folder."""
    return name + _OF_PART if name in _CONFIGS and not is_whole else name


def path_of(folder: Path, name: str) -> Path:
    """Return a manifest file's path in a checkpoint folder or a host's folder."""
    path, of_part = folder / name, folder / stored_name(name, is_whole=False)
    return path if path == of_part or lexists(path) or not exists(of_part) else of_part


def from_bytes(data: bytes, *, where: object) -> HostFile:
    """Parse and check a `host.json`.

    Raises:
        MismatchError: It has another format version.
        CheckpointError: It is damaged or malformed.
    """
    return json_file.unsealed(data, _from_table, kind="host file", form=FORMAT, where=where)


def attempt_of(folder: Path) -> str | None:
    """Return the save attempt whose manifest and `host.json` lie in a folder, or None if either is missing."""
    try:
        host = from_bytes(read_regular(folder / HOST), where=folder / HOST)
        digest = digest_of(read_regular(folder / MANIFEST))
    except (OSError, CheckpointError):
        return None
    return host.attempt if digest == host.manifest else None


def _from_table(table: Mapping[str, Any]) -> HostFile:
    hosts = tuple(map(str, table["hosts"]))
    if not hosts:
        raise ValueError("there are no hosts")
    writers = {name: integers(values, most=len(hosts) - 1) for name, values in table["writers"].items()}
    pieces = {}
    for name, values in table["held"].items():
        pieces[name] = integers(values, most=len(writers[name]) - 1)
        if list(pieces[name]) != sorted(set(pieces[name])):
            raise ValueError(f"the pieces of {name} are not in order")
    host = None if table["host"] is None else integer(table["host"], most=len(hosts) - 1)
    return HostFile(str(table["attempt"]), str(table["manifest_xxh3_64"]), host, hosts, writers, pieces)


def union(sets: Iterable[PieceNumbers]) -> dict[str, tuple[int, ...]]:
    """Return the pieces in at least one set."""
    merged: dict[str, set[int]] = {}
    for numbers in sets:
        for name, members in numbers.items():
            merged.setdefault(name, set()).update(members)
    return {name: tuple(sorted(members)) for name, members in merged.items() if members}


def without(numbers: PieceNumbers, excluded: PieceNumbers) -> dict[str, tuple[int, ...]]:
    """Return the pieces in `numbers` but not in `excluded`."""
    difference = {name: sorted({*members}.difference(excluded.get(name, ()))) for name, members in numbers.items()}
    return {name: tuple(members) for name, members in difference.items() if members}
