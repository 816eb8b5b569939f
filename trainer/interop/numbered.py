"""Names AdamW state keyed by parameter number, as in `Optimizer.state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from reprise.errors import MismatchError
from reprise.tensors import canonical_name
from trainer.interop.formats import listed
from trainer.interop.source import MOMENTS
from trainer.interop.torch_file import is_plain

Table = Mapping[Any, Any]


def entries_by_name(
    optimizer: Table,
    orders: Iterable[Sequence[Sequence[Any]]],
    shapes: Mapping[Any, Sequence[int]],
    *,
    program: str,
    where: object,
) -> dict[Any, Table]:
    """Return each parameter's optimizer state, which must have its moments in its shape. FSDP stores it by name.

    Args:
        orders: Groups that the program may have made of the parameters. The first that fits counts.
        program: The program, for messages.

    Raises:
        MismatchError: No order has the optimizer's group sizes, or moments are missing or have another shape.
    """
    state, groups = optimizer["state"], [list(group.get("params", ())) for group in optimizer["param_groups"]]
    by_name = {canonical_name(key): entry for key, entry in state.items() if isinstance(key, str)}
    sizes, fitting, tried = [len(group) for group in groups if group], [by_name] if by_name else [], list[str]()
    for order in orders:
        filled = [group for group in order if group]
        tried.append(" and ".join(str(len(group)) for group in filled))
        if [len(group) for group in filled] == sizes and not by_name:
            numbers = zip(chain(*filled), chain(*groups), strict=True)
            fitting.append({name: state.get(number, {}) for name, number in numbers})
    problems = list[str]()
    for entries in fitting:
        misfits = [name for name, shape in shapes.items() if not _has_moments(entries.get(name, {}), shape)]
        if not misfits:
            return entries
        problems = problems or misfits
    if problems:
        lines = [f"{name}: no {' and '.join(MOMENTS)} of shape {list(shapes[name])}" for name in problems]
        raise MismatchError(
            "The optimizer's moments do not fit the model",
            where=where,
            found=listed(lines, "problem"),
            fix="It was saved before the first step, or by another optimizer than AdamW. Import the weights alone with "
            "--weights-only.",
        )
    raise MismatchError(
        f"The moments cannot be matched to parameters: {program} stores them by number",
        where=where,
        expected=f"groups of {', or of '.join(tried)} parameters",
        found=f"groups of {' and '.join(map(str, sizes))}",
        fix="Parameters that were frozen must be listed in train.freeze, and others grouped as that program does. Or "
        "import the weights alone with --weights-only.",
    )


def _has_moments(entry: Table, shape: Sequence[int]) -> bool:
    moments = [entry.get(kind) for kind in MOMENTS]
    return all(is_plain(moment) and tuple(moment.shape) == tuple(shape) for moment in moments)
