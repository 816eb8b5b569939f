"""A checkpoint's files by its manifest, read without torch, and their division among hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from reprise.format.names import MANIFEST, MANIFEST_FORMAT, OPTIMIZER_DROPPED, OPTIMIZER_FILES, is_lightened
from reprise.storage import json_file
from reprise.storage.json_file import Json, integer
from reprise.stores.locations import files_of


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint's content.

    Args:
        manifest: The `manifest.json` bytes.
        digest: Their digest. Checkpoints with equal digests are equal.
        sizes: All other files' sizes in bytes, by name.
    """

    manifest: bytes
    digest: str
    sizes: dict[str, int]

    @staticmethod
    def at(path: Path) -> CheckpointFiles:
        """Read the content of a checkpoint in a folder or a store.

        Raises:
            FileNotFoundError: The checkpoint is gone.
            MismatchError: It has another format version.
            CheckpointError: It is damaged or malformed.
        """
        files, where = files_of(path), path / MANIFEST
        manifest = files.read_whole(where)
        sizes = json_file.unsealed(manifest, _sizes, kind="manifest", form=MANIFEST_FORMAT, where=where)
        if is_lightened(files.tree(path)):  # a marker explains the missing files
            sizes = {name: size for name, size in sizes.items() if not name.startswith(OPTIMIZER_FILES)}
            sizes[OPTIMIZER_DROPPED] = 0
        return CheckpointFiles(manifest, xxhash.xxh3_64_hexdigest(manifest), sizes)

    @property
    def total_bytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(self.sizes.values()) + len(self.manifest)


def share(sizes: dict[str, int], host: int, hosts: int) -> dict[str, int]:
    """Return a host's files, largest first: every file of its rank by size, modulo `hosts`.

    With at least five equal files per host, no host has more than 1.2 times the mean.
    """
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return {name: sizes[name] for name in names[host::hosts]}


def _sizes(table: Json) -> dict[str, int]:
    sizes = {str(name): integer(entry["bytes"]) for name, entry in table["files"].items()}
    for name in sizes:
        if {"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name:
            raise ValueError(f"the file name {name!r} is not a path inside the folder")
    return sizes
