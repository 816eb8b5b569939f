"""Lists checkpoints: the newest from their JSON files, headers and first blocks, older ones without a check."""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import HostFile
from reprise.format.names import ADAPTERS, HOST, MANIFEST, OPTIMIZER_DROPPED, STATE, is_lightened
from reprise.loading.blocks import check_first_blocks
from reprise.loading.reader import Checkpoint, check_state, misleading_files, open_checkpoint, read_content, read_places
from reprise.management.host_share import missing_everywhere, share_of
from reprise.management.paths import checkpoint_folder, checkpoints_in, refuse_link
from reprise.management.summary import CheckpointStatus, CheckpointSummary
from reprise.storage import json_file
from reprise.storage.files import Files
from reprise.storage.folder import WEIGHTS, is_iteration_name, iteration_of, named_iteration, shown_name
from reprise.storage.holds import HOLD, is_held
from reprise.storage.json_file import Json
from reprise.storage.paths import is_symlink
from reprise.storage.patience import unreadable
from reprise.stores.locations import files_of, is_stored, location

CHECKED = 100  # newest checkpoints of a folder, by default
Tree = Mapping[str, os.stat_result]  # of a checkpoint, by the names of its files


def list_checkpoints(*folders: str | Path, check: int | None = CHECKED) -> tuple[CheckpointSummary, ...]:
    """Return the checkpoints of runs in order, without reading their tensors beyond the first block of a file.

    Args:
        folders: of runs, of their checkpoints, or of hosts.
        check: how many of the newest checkpoints of each folder are checked, superseded ones last, and as many of its
            saves of the weights alone; None for all. An iteration checked in one of the folders is checked in all. The
            others are `unchecked`; one without a manifest, or whose state cannot be read, is checked.

    Raises:
        CheckpointError: if a folder is missing or holds no checkpoint. A damaged checkpoint is no error.
        OSError: if a folder cannot be listed.
    """
    roots = [checkpoint_folder(folder) for folder in map(location, folders)]
    listed = [(root, _trees_in(root, files_of(root))) for root in roots]
    checked = {shown_name(path) for _, trees in listed for path in _newest(trees, check)}
    summaries, parts = list[CheckpointSummary](), list[tuple[int, HostFile | None]]()
    for root, trees in listed:
        for path, tree in trees.items():
            files, checkpoint = files_of(path), None
            summary = _listed(root, path, tree, files)
            if shown_name(path) in checked or summary.problem is not None:
                summary, checkpoint = _checked(summary, files)
            summaries.append(summary)
            parts += [] if checkpoint is None else [(checkpoint.iteration, checkpoint.host)]
    missing = missing_everywhere(folders, parts)
    return tuple(
        replace(summary, missing_everywhere=missing[summary.iteration]) if summary.iteration in missing else summary
        for summary in summaries
    )


def _trees_in(folder: Path, files: Files) -> dict[Path, Tree | None]:
    """Return the checkpoints of a folder in order; in a store, with their objects, from a single listing.

    Raises:
        CheckpointError: if there is no checkpoint.
    """
    if not is_stored(folder):
        return dict.fromkeys(checkpoints_in(folder))
    trees: dict[str, dict[str, os.stat_result]] = defaultdict(dict)
    for name, status in files.tree(folder).items():
        head, _, inner = name.removeprefix(f"{WEIGHTS}/").partition("/")
        if is_iteration_name(head) and inner:
            trees[name.removesuffix(f"/{inner}")][inner] = status
    names = sorted((name for name, tree in trees.items() if MANIFEST in tree), key=lambda n: (n.startswith(WEIGHTS), n))
    return {folder / name: trees[name] for name in names} or dict.fromkeys(checkpoints_in(folder))


def _newest(paths: Iterable[Path], count: int | None) -> list[Path]:
    """Return the newest checkpoints of a run and its newest saves of the weights alone, and all links.

    Args:
        count: of each kind, superseded checkpoints last; None for all.
    """
    if count is None:
        return list(paths)
    links, by_folder = list[Path](), defaultdict[Path, list[Path]](list)
    for path in paths:
        (links if is_symlink(path) else by_folder[path.parent]).append(path)
    return links + [path for kind in by_folder.values() for path in heapq.nlargest(count, kind, key=_age_rank)]


def _age_rank(path: Path) -> tuple[bool, int]:
    return iteration_of(path) is not None, named_iteration(path.name) or 0


def _listed(folder: Path, path: Path, tree: Tree | None, files: Files) -> CheckpointSummary:
    """Return the summary of a checkpoint without a check, with a problem if a check must tell what it is.

    Args:
        tree: its objects in a store, where its state is not read: that would be a request for each checkpoint.
    """
    state: Json | None = None
    problem: TrainerError | None = None
    try:
        if tree is None:
            tree = {} if is_symlink(path) else files.tree(path)
            state = json_file.parse(read_content(path / STATE, files), where=path / STATE)
            check_state(state, path)
        if MANIFEST not in tree:
            problem = CheckpointError("A checkpoint has no manifest", where=path)
    except OSError as error:
        problem = unreadable(error, where=path)
    except TrainerError as error:
        problem = error
    tree = tree or {}
    return CheckpointSummary(
        folder,
        path,
        named_iteration(path.name),
        _size(path, tree, files),
        (tree.get(MANIFEST) or path.lstat()).st_mtime,  # not the folder's time: a `hold` file changes it
        CheckpointStatus.UNCHECKED,
        problem,
        state,
        has_adapters=ADAPTERS in tree,
        is_lightened=is_lightened(tree) or OPTIMIZER_DROPPED in (state or ()),
        is_pinned=any(name.startswith(HOLD) for name in tree) and is_held(path),
        is_link=is_symlink(path),
        is_superseded=iteration_of(path) is None,
    )


def _checked(summary: CheckpointSummary, files: Files) -> tuple[CheckpointSummary, Checkpoint | None]:
    """Return the checked summary of a checkpoint, and the checkpoint unless it cannot be opened."""
    checkpoint: Checkpoint | None = None
    try:
        refuse_link(summary.path)
        checkpoint = open_checkpoint(summary.path, files)
        check_first_blocks(checkpoint, read_places(checkpoint))
        summary = replace(
            summary,
            iteration=checkpoint.iteration,
            status=CheckpointStatus.WHOLE if checkpoint.is_whole else CheckpointStatus.PART,
            problem=None,
            state=checkpoint.state,
            is_lightened=checkpoint.is_lightened,
            foreign_files=tuple(misleading_files(checkpoint)),
            share=share_of(checkpoint),
        )
    except TrainerError as error:
        summary = replace(summary, status=CheckpointStatus.of(error), problem=error, state=None)
    return summary, checkpoint


def whole_checkpoint(path: Path, files: Files) -> Checkpoint | None:
    """Return a checkpoint that is whole, as far as its JSON files, headers and first blocks show."""
    summary, checkpoint = _checked(_listed(path.parent, path, None, files), files)
    return checkpoint if summary.status is CheckpointStatus.WHOLE else None


def size_of(path: Path, files: Files) -> int:
    """Return the size of a checkpoint's files in bytes; in the folder of a host, their size on the disk."""
    return _size(path, files.tree(path), files)


def _size(path: Path, tree: Tree, files: Files) -> int:
    if HOST in tree:  # most of its files may be holes
        return files.allocated_bytes(path)
    return sum(status.st_size for status in tree.values())
