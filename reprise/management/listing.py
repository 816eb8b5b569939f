"""Lists checkpoints. The newest are checked by their JSON files, headers and first blocks, older ones not at all."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from reprise.errors import TrainerError
from reprise.format.names import ADAPTERS, HOST, MANIFEST, OPTIMIZER_DROPPED, STATE, is_lightened
from reprise.loading.blocks import check_first_blocks
from reprise.loading.reader import Tree, check_state
from reprise.management.host_share import share_of
from reprise.management.paths import checkpoint_folder, checkpoints_in, examined
from reprise.management.summary import CheckpointStatus, CheckpointSummary
from reprise.storage import json_file
from reprise.storage.folder import iteration_of, named_iteration
from reprise.storage.holds import HOLD, is_held
from reprise.storage.json_file import Json
from reprise.storage.paths import is_symlink
from reprise.stores.locations import files_of, location

CHECKED = 100  # how many of a folder's newest checkpoints, by default


def list_checkpoints(*folders: str | Path, check: int | None = CHECKED) -> tuple[CheckpointSummary, ...]:
    """Return the checkpoints in runs in order, reading at most the first block in each tensor file.

    Args:
        folders: Run folders, checkpoint folders of runs, or hosts' folders.
        check: How many of the newest checkpoints to check per folder, and how many weights-only saves. None checks all.
            The others are `unchecked`, except checkpoints without a manifest or a readable state.

    Raises:
        CheckpointError: A folder is missing or holds no checkpoint. A damaged checkpoint does not raise.
        OSError: A folder cannot be listed.
    """
    summaries = list[CheckpointSummary]()
    for root in [checkpoint_folder(folder) for folder in map(location, folders)]:
        paths = checkpoints_in(root)
        checked = {path for _, group in groupby(paths, attrgetter("parent")) for path in deque(group, maxlen=check)}
        for summary in files_of(root).map(partial(_listed, root), paths):
            is_checked = summary.path in checked or summary.state is None
            summaries.append(_checked(summary) if is_checked else summary)
    return tuple(summaries)


def _listed(folder: Path, path: Path) -> CheckpointSummary:
    """Return an unchecked summary, without a state if only a check can classify the checkpoint."""
    tree: Tree = {}
    state: Json | None = None
    files = files_of(path)
    with contextlib.suppress(OSError, TrainerError):  # a check names the error
        tree = {} if is_symlink(path) else files.tree(path)
        content = json_file.parse(files.read_whole(path / STATE), where=path / STATE)
        check_state(content, path)
        state = content if MANIFEST in tree else None
    return CheckpointSummary(
        folder,
        path,
        named_iteration(path.name),
        size_of(path, tree),
        (tree.get(MANIFEST) or path.lstat()).st_mtime,  # not the folder's time, which a `hold` file changes
        CheckpointStatus.UNCHECKED,
        None,
        state,
        has_adapters=ADAPTERS in tree,
        is_lightened=is_lightened(tree) or OPTIMIZER_DROPPED in (state or ()),
        is_pinned=any(name.startswith(HOLD) for name in tree) and is_held(path),
        is_link=is_symlink(path),
        is_superseded=iteration_of(path) is None,
    )


def _checked(summary: CheckpointSummary) -> CheckpointSummary:
    status, problem, checkpoint = examined(summary.path, check_first_blocks)
    if checkpoint is None or problem is not None:
        return replace(summary, status=status, problem=problem, state=None)
    return replace(
        summary,
        iteration=checkpoint.iteration,
        status=status,
        state=checkpoint.state,
        is_lightened=checkpoint.is_lightened,
        share=share_of(checkpoint),
    )


def size_of(path: Path, tree: Tree | None = None) -> int:
    """Return the size of a checkpoint's files in bytes; in a host's folder, their size on disk.

    Args:
        tree: Its files. They are listed by default.
    """
    files = files_of(path)
    tree = files.tree(path) if tree is None else tree
    if HOST in tree:  # its files may be mostly holes
        return files.allocated_bytes(path)
    return sum(status.st_size for status in tree.values())
