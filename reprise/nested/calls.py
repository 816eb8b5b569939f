"""Saves and loads a tree with live tensors and values, from the argument checks to the agreement."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from reprise.errors import MismatchError, count_of
from reprise.format.names import STATE
from reprise.loading.choose import LoadSource
from reprise.loading.newest import has_no_checkpoint
from reprise.loading.reader import Checkpoint
from reprise.loading.restorer import Restorer
from reprise.nested.agreement import KnownTables, agree_on_state
from reprise.nested.documents import document, read_state
from reprise.nested.filling import Filling
from reprise.nested.held import HeldTensors, local_tensors
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.optimizers import check_optimizer
from reprise.nested.save_arguments import (
    check_iteration,
    check_options,
    check_vacant,
    require,
    require_path,
    target_folder,
)
from reprise.nested.stored_names import OPTIMIZER, PER_RANK, RNG, keys_of_pointer, pointer, stored_name
from reprise.nested.tree import Tree
from reprise.ranks.joint_call import JointCall
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.storage.json_file import to_bytes
from reprise.storage.patience import look
from reprise.stores.locations import location
from reprise.tensors.live import Contents, LiveTensor
from reprise.tensors.modes import own_modes

_log = logging.getLogger(__name__)

MakeTree = Callable[[], Tree]

# By ranks, the tables from the last save's agreement.
_known = defaultdict[tuple[int, ...], KnownTables](KnownTables)


def contents_of(
    call: JointCall,
    make_tree: MakeTree,
    *,
    holdings: HeldTensors,
    iteration: int,
    from_rank0: Sequence[str],
    before_decision: Callable[[], None],
) -> Contents:
    """Return what to save. Collective.

    Args:
        make_tree: Returns this rank's tree.
        holdings: The previous save's tensors, if there was a save. This save's tensors replace them.
        before_decision: Called on the coordinator once every rank can save. No rank saves if it raises.

    Raises:
        TrainerError: A rank cannot save, or the ranks' trees conflict. Every rank raises.
        BaseException: This rank's own error. Other ranks raise a TrainerError naming it.
    """
    with call.preparing(), own_modes():
        check_iteration(iteration)
        tree = make_tree()
        section = tree.section()
        table = holdings.table_of(tree, from_rank0)
        data = to_bytes(section)
    joint, joined = agree_on_state(call, table, data, holdings.known, before_decision=before_decision)
    live = holdings.with_replicas(joint, call.channel.rank)
    return Contents(joint.specs, live, joint.aliases, {STATE: document(joined or section, iteration), **tree.files})


def save_now(
    folder: str | Path,
    call: JointCall,
    make_tree: MakeTree,
    *,
    iteration: int,
    keep: int,
    file_bytes: int,
    from_rank0: Sequence[str],
    overwrite: bool,
) -> Path:
    """Save as `folder/iter_<iteration>` while the caller waits, and return this path. Collective.

    The coordinator locks the folder before other ranks learn about the decision to save.

    Args:
        keep: How many newest checkpoints to keep. 0 keeps all.
        file_bytes: The largest tensor file in bytes.
        overwrite: Whether the iteration may already exist. Only the coordinator's value counts.
        from_rank0: See `contents_of` for this and the other arguments.

    Raises:
        TrainerError: The save did not produce a checkpoint.
        BaseException: See `contents_of`.
    """
    with call.preparing():
        policy = SavePolicy(target_folder(folder), retention=Retention(keep), file_bytes=file_bytes)
        check_options(policy, from_rank0)
        checkpointer = Checkpointer(policy, call.channel, nonce=call.nonce)

    def take_folder() -> None:
        checkpointer.take_folder()
        if not overwrite:
            check_vacant(policy.folder, iteration)

    with closing(checkpointer), closing(checkpointer):  # twice: an interrupt may end the first
        contents = contents_of(
            call,
            make_tree,
            holdings=HeldTensors(_known[call.channel.ranks]),
            iteration=iteration,
            from_rank0=from_rank0,
            before_decision=take_folder,
        )
        report = checkpointer.save(iteration, contents)
    assert report is not None
    if report.error is not None:
        raise report.error
    return report.path


def fill(
    call: JointCall,
    path: str | Path,
    make_tree: MakeTree,
    *,
    strict: Strictness,
    iteration: int | None,
    missing_ok: bool,
) -> LoadedState:
    """Fill a tree from a checkpoint, and return its values, with the names missing on either side.

    Args:
        iteration: The iteration to load from a run's folder. None loads the newest valid checkpoint.
        missing_ok: Whether to fill nothing and return iteration 0 if there is no checkpoint. Only the coordinator's
            value counts.

    Raises:
        PartialLoadError: The load failed while it changed the tree. Every rank raises.
        TrainerError: The load failed before anything changed. Every rank raises.
        BaseException: This rank's own error. Other ranks raise a TrainerError naming it.
    """
    channel = call.channel
    with call.preparing(), own_modes():
        require_path(path)
        source = location(path)
        require("`strict`", type(strict) is bool or strict == "missing", 'True, False or "missing"', strict)
        tree = make_tree()
        tensors, own_aliases = local_tensors(tree)
    is_missing = partial(look, partial(has_no_checkpoint, source), where=source)
    requests = _join_requests(call, tree, own_aliases, is_missing=lambda: missing_ok and is_missing())
    if requests is None:
        return LoadedState({**tree.given, "iteration": 0})
    names, aliases = requests
    entries, fillings = {keys_of_pointer(name)[0] for part in names for name in part}, list[Filling]()

    def live(checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        check_optimizer(checkpoint, tree.optimizers.get(OPTIMIZER[:1]))
        stored, requested = read_state(checkpoint), entries
        saved = len(stored.members(PER_RANK))
        if tree.may_drop_random_state and saved != channel.world_size:
            tree.declined = (*tree.declined, RNG)
            requested = entries - {PER_RANK}
            if channel.coordinates:
                ranks = f"saved on {count_of(saved, 'rank')}, loaded on {channel.world_size}"
                _log.warning(f"random state not loaded from {checkpoint.path}: {ranks}")
        elif tree.returns and PER_RANK in entries and saved not in (0, channel.world_size):
            raise MismatchError(
                "The checkpoint has random state or other per-rank state for a different number of ranks",
                where=checkpoint.path,
                expected=f"{count_of(channel.world_size, 'rank')}, as in this load",
                found=f"{count_of(saved, 'rank')}, as in the save",
                fix='Load on the same number of ranks, or with rng="if_same_ranks" and without per_rank.',
            )
        fillings.append(Filling(tree, tensors, aliases, names, requested, strict, checkpoint, stored))
        return fillings[-1].live()

    Restorer(channel, nonce=call.nonce).restore(
        LoadSource(source, iteration), check=lambda _: None, live=live, finish=lambda: fillings[-1].finish()
    )
    return fillings[-1].result(is_first=channel.coordinates)


def _join_requests(
    call: JointCall, tree: Tree, aliases: Mapping[str, str], *, is_missing: Callable[[], bool]
) -> tuple[list[list[str]], dict[str, str]] | None:
    """Return two lists of JSON Pointers, to the tensors and to all else that any rank requests; and all aliases.

    Collective. A load creates all state saved for an optimizer's parameters. An empty key stands for an object.

    Args:
        is_missing: Returns whether there is nothing to load. Then the result is None. Called on the coordinator only.
    """
    tensors = [keys for keys in tree.tensors if stored_name(keys)[1] not in aliases]
    states = [(*top, "state", name) for top, each in tree.optimizers.items() for name in each.parameters]
    objects = [(*keys, "") for keys in (*tree.optimizers, *tree.objects)]
    requests = [[*map(pointer, keys)] for keys in (tensors, (*tree.receivers, *states, *objects))]
    offers = call.offer(json.dumps([*requests, aliases]).encode())
    with call.preparing():
        is_there = call.channel.coordinates and not is_missing()
        answer = json.dumps(_joined(offers) if is_there else None)
    joined: tuple[list[list[str]], dict[str, str]] | None = json.loads(call.decide(answer))
    return joined


def _joined(offers: Sequence[bytes]) -> tuple[list[list[str]], dict[str, str]]:
    """Return the result of `_join_requests`, given all ranks' requests."""
    tensors, values, aliases = zip(*(json.loads(offer) for offer in {*offers}), strict=True)
    names = [sorted({name for part in parts for name in part}) for parts in (tensors, values)]
    return names, {alias: name for pairs in aliases for alias, name in pairs.items()}
