"""Preparing a checkpoint: which syncs may come at one time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from reprise.commit import finish
from reprise.commit.attempt import Attempt
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder

SPEC = TensorSpec(TensorKind.OPTIMIZER, "w.exp_avg", (2,), StoredDtype.F32, (2,))


class Batches(Files):
    """Files that note what each batch of syncs makes durable, and which names were there when it began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.batches: list[set[str]] = []
        self.names: list[set[str]] = []

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        self.batches.append(set())
        self.names.append({path.name for path in self._folder.iterdir()})
        super().sync_together(syncs)

    def sync(self, descriptor: int) -> None:
        self.batches[-1].add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        self.batches[-1].add(f"{path.name}/")
        super().sync_folder(path)


def test_all_that_the_rename_needs_is_synced_in_one_batch(tmp_path: Path) -> None:
    layout = build_layout([SPEC], file_bytes=1 << 20)
    attempt = Attempt(7, "n-1", CheckpointFolder(tmp_path, Files()), layout)
    (attempt.partial / "optimizer").mkdir(parents=True)
    files = Batches(attempt.partial)
    attempt = Attempt(7, "n-1", CheckpointFolder(tmp_path, files), layout)
    finish.prepare(attempt, {"a.json": b"{}", "manifest.json": b"{}"}, lock=None)
    partial = f"{attempt.partial.name}/"
    assert files.batches == [{"a.json", "manifest.json", "optimizer/", partial}]
    assert files.names == [{"a.json", "manifest.json", "optimizer"}]  # the folder is synced with all its names
