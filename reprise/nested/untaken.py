"""What a load leaves in a checkpoint, and what it replaces in a program, unseen by the loop: one line names each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from reprise.loading.reader import Checkpoint
from reprise.nested.documents import StoredState
from reprise.nested.own_state import is_random_state
from reprise.nested.stored_names import MODEL, OPTIMIZER, PER_RANK, keys_of_pointer
from reprise.nested.tree import Tree
from reprise.nested.typed_values import leaves
from reprise.storage.json_file import Json

_log = logging.getLogger(__name__)
_FLAGS = (bool, str, type(None))


def log_untaken(
    checkpoint: Checkpoint, saved: StoredState, tree: Tree, entries: Collection[str], returned: Mapping[str, object]
) -> None:
    """Log which state of a checkpoint a load was not given, unless the call says that this is meant.

    An optimizer is seen in the call, and weights are often all that a state dict asks for. Returned values count as
    taken, but not those of an object such as a scheduler.

    Args:
        saved: the state of the checkpoint.
        entries: the outermost keys that any rank gives.
        returned: the values in the result.
    """
    objects = {keys_of_pointer(where)[0] for where, value in saved.values.items() if isinstance(value, dict) and value}
    given_names = {MODEL, OPTIMIZER[0], *entries} | (returned.keys() - objects)
    names = []
    for keys in (*(keys for keys, _ in leaves(saved.root)), *map(keys_of_pointer, filter(None, saved.groups))):
        if keys[0] in given_names:
            continue
        if not tree.takes_rest:
            names += [keys[0]] if tree.optimizers else []
        elif is_random_state(keys):
            names += ["random state (rng=)"] if "rng" not in tree.declined else []
        else:
            argument, name = ("per_rank", "/".join(keys[2:3] or keys)) if keys[0] == PER_RANK else ("state", keys[0])
            names += [f"{name} ({argument}=)"] if argument not in tree.declined else []
    if names:
        hint = "; False or an empty dict says that this is meant" if tree.takes_rest else ""
        text = ", ".join(dict.fromkeys(names))
        _log.warning(f"{checkpoint.path} has what this load was not given: {text}{hint}")


def log_options(checkpoint: Checkpoint, tree: Tree, numbers: Mapping[str, Json]) -> None:
    """Log the options of parameter groups, such as `fused`, that the checkpoint replaced; numbers are not options.

    Args:
        numbers: by JSON Pointer of a parameter group, its values in the checkpoint.
    """
    changes = [
        f"{key}={saved[key]} for {value}"
        for where, optimizer in tree.optimizers.items()
        for number, group in enumerate(optimizer.groups)
        for saved in [numbers.get(f"{where}/param_groups/{number}", {})]
        for key, value in group.numbers.items()
        if key in saved and saved[key] != value and (isinstance(value, _FLAGS) or isinstance(saved[key], _FLAGS))
    ]
    if changes:
        text = ", ".join(dict.fromkeys(changes))
        _log.warning(f"options of an optimizer are those of {checkpoint.path}, for equal bits: {text}")
