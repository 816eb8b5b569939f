"""Old checkpoints at a glance: from the entries of their folders and `trainer_state.json`, without a check."""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from reprise import json_file
from reprise.errors import CheckpointError, TrainerError
from reprise.format.names import ADAPTERS, HOST, MANIFEST, STATE
from reprise.json_file import Json
from reprise.loading.reader import check_state, read_content
from reprise.management.paths import checkpoints_in
from reprise.management.summary import CheckpointStatus, CheckpointSummary
from reprise.paths import is_symlink
from reprise.storage.files import Files
from reprise.storage.folder import WEIGHTS, is_iteration_name, iteration_of, named_iteration
from reprise.storage.holds import HOLD, is_held
from reprise.stores.location import is_stored

_MEMBER, _END = b'\n  "', b"\n}\n"  # in the form of `json_file.to_bytes`
Tree = Mapping[str, os.stat_result]  # of a checkpoint, by the names of its files


def trees_in(folder: Path, files: Files) -> dict[Path, Tree | None]:
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


def newest(paths: Iterable[Path], count: int | None) -> list[Path]:
    """Return the newest checkpoints of a run and its newest saves of the weights alone, and all links.

    Args:
        count: of each kind, superseded checkpoints last; None for all.
    """
    if count is None:
        return list(paths)
    links, by_folder = list[Path](), defaultdict[Path, list[Path]](list)
    for path in paths:
        (links if is_symlink(path) else by_folder[path.parent]).append(path)
    return links + [path for found in by_folder.values() for path in heapq.nlargest(count, found, key=_age_rank)]


def _age_rank(path: Path) -> tuple[bool, int]:
    return iteration_of(path) is not None, named_iteration(path.name) or 0


class StateParser:
    """Parses the states of a run; a member with the text of the state before is not parsed again, but the same object.

    Ten thousand states then take the time and the memory of what differs in them.
    """

    def __init__(self) -> None:
        self._members: dict[bytes, Json] = {}

    def parse(self, document: bytes, path: Path) -> Json:
        """Return the state of a checkpoint.

        Raises:
            MismatchError, CheckpointError: as `json_file.parse` and `check_state`.
        """
        try:
            state = self._joined(document, path)
        except CheckpointError:
            state = json_file.parse(document, where=path / STATE)
        check_state(state, path)
        return state

    def _joined(self, document: bytes, path: Path) -> Json:
        """Return a state from its members; a CheckpointError for another form than that of `json_file.to_bytes`."""
        begin, *texts = document.removesuffix(_END).split(_MEMBER)
        before, self._members = self._members, {}
        for number, text in enumerate(texts, start=1):
            whole = text if number < len(texts) else text + b","
            known = before.get(whole)
            self._members[whole] = json_file.parse(b'{"%b}' % whole[:-1], where=path) if known is None else known
        state = {name: value for member in self._members.values() for name, value in member.items()}
        has_commas = all(text.endswith(b",") for text in self._members)
        if begin != b"{" or not document.endswith(_END) or not has_commas or len(state) != len(texts):
            raise CheckpointError("A state has another form", where=path / STATE)
        return state


def glance(folder: Path, path: Path, tree: Tree | None, files: Files, parser: StateParser) -> CheckpointSummary | None:
    """Return the summary of a checkpoint without a check; None without a manifest, or if the state cannot be read.

    Args:
        folder: the checkpoint folder of the run.
        tree: its objects in a store, where its state is not read: that would be a request for each checkpoint.
        parser: of the states of the run.
    """
    try:
        state = parser.parse(read_content(path / STATE, files), path) if tree is None else None
        tree = files.tree(path) if tree is None else tree
        written_at = tree[MANIFEST].st_mtime
        is_of_host = HOST in tree  # most of its files may be holes
        size = files.allocated_bytes(path) if is_of_host else sum(status.st_size for status in tree.values())
    except (OSError, TrainerError, KeyError):
        return None
    return CheckpointSummary(
        folder,
        path,
        named_iteration(path.name),
        size,
        written_at,
        CheckpointStatus.UNCHECKED,
        None,
        state,
        has_adapters=ADAPTERS in tree,
        is_pinned=any(name.startswith(HOLD) for name in tree) and is_held(path),
        is_superseded=iteration_of(path) is None,
    )
