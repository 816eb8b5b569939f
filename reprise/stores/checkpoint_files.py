"""A checkpoint's files by its manifest, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from reprise.errors import CheckpointError
from reprise.format.manifest import from_bytes
from reprise.format.names import HOST, MANIFEST, OPTIMIZER_DROPPED, OPTIMIZER_FILES, is_lightened
from reprise.stores.locations import files_of


def part_of_host(path: Path) -> CheckpointError:
    """Return the error for a checkpoint that a single host's folder has in part."""
    fix = "Join the hosts' folders: `reprise checkpoint gather FOLDER... OUT`."
    return CheckpointError("A folder holds the part of one host", where=path, found=HOST, fix=fix)


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
            CheckpointError: It is damaged, malformed or a single host's part, or a file is missing or has the wrong
                size.
        """
        files = files_of(path)
        tree = files.tree(path)
        if HOST in tree:
            raise part_of_host(path)
        data = files.read_whole(path / MANIFEST)
        manifest = from_bytes(data, where=path / MANIFEST)
        sizes = {name: entry.total_bytes for name, entry in manifest.files.items()}
        if is_lightened(tree):  # a marker explains the missing files
            sizes = {name: size for name, size in sizes.items() if not name.startswith(OPTIMIZER_FILES)}
            sizes[OPTIMIZER_DROPPED] = 0
        for name, size in sizes.items():
            actual = tree[name].st_size if name in tree else None
            if actual != size:
                raise CheckpointError("A file has the wrong size", where=path / name, expected=size, found=actual)
        return CheckpointFiles(data, xxhash.xxh3_64_hexdigest(data), sizes)

    @property
    def total_bytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(self.sizes.values()) + len(self.manifest)
