"""Reads what a run left: its recorded curve, and the files of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reprise.format import LINEAGE, MANIFEST, STATE, Place
from reprise.loading import Checkpoint, open_checkpoint
from reprise.loading.blocks import blocks_of
from reprise.storage import Files
from trainer.config.saved import RUN_CONFIG

TEMPORARY = (".partial", ".deleting", ".new")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of iterations; an incomplete last line is omitted."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def curve_of(run: Path) -> list[tuple[object, ...]]:
    """Return the recorded iterations with the bits of their figures."""
    keys = ("iteration", "loss_hex", "grad_norm_hex", "lr_hex", "consumed_samples")
    return [tuple(row[key] for key in keys) for row in rows_of(run)]


def _contents_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint by name; the manifest without the attempt and its own digest.

    The settings of the run are left out, since an unbroken run keeps every checkpoint and a killed one does not, and
    so is the lineage, which has random ids.
    """
    contents = {
        str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()
    }
    document = json.loads(contents.get(MANIFEST, b"{}"))
    members = {key: value for key, value in document.items() if key not in ("attempt", "xxh3_64")}
    files = members.get("files", {})
    contents.pop(RUN_CONFIG, None)
    files.pop(RUN_CONFIG, None)
    if STATE in contents:
        state = json.loads(contents[STATE])
        state.pop(LINEAGE, None)
        contents[STATE] = json.dumps(state).encode()
        files.get(STATE, {}).pop("xxh3_64", None)
    return {**contents, MANIFEST: json.dumps(members).encode()}


def differences(checkpoint: Path, reference: Path) -> list[str]:
    """Return a line if a checkpoint differs from that of the unbroken run."""
    actual, expected = _contents_of(checkpoint), _contents_of(reference)
    names = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
    return [f"{checkpoint.name} differs from the unbroken run's in {', '.join(names)}"] if names else []


def leftovers(*folders: Path) -> list[str]:
    """Return a line if there are temporary files below folders."""
    paths = {str(path) for folder in folders for path in folder.rglob("*") if path.name.endswith(TEMPORARY)}
    return [f"left behind: {', '.join(sorted(paths))}"] if paths else []


def held_ranges(checkpoint: Checkpoint) -> Iterator[tuple[Place, int, int]]:
    """Yield the ranges `[lo, hi)` of the tensor files that the folder of a host holds, and the tensors they are of."""
    assert checkpoint.host is not None
    for block in blocks_of(checkpoint, checkpoint.host.held):
        for start, _, length in block.packed.spans(block.lo, block.hi):
            lo = block.place.offset + start
            yield block.place, lo, lo + length


def differing_pieces(path: Path, reference: Path) -> list[str]:
    """Return a line if a piece that a host lists in a local checkpoint differs from a whole checkpoint's bytes."""
    checkpoint = open_checkpoint(path, Files())
    names = [name for name, entry in checkpoint.manifest.files.items() if entry.is_tensor_file]
    files = {name: [(folder / name).read_bytes() for folder in (path, reference)] for name in names}
    for place, lo, hi in held_ranges(checkpoint):
        actual, expected = files[place.file]
        if actual[lo:hi] != expected[lo:hi]:
            return [f"{path} differs from the unbroken run's in {place.spec.name}"]
    return []
