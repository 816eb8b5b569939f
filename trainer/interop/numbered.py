"""Names AdamW state keyed by parameter number, as in `Optimizer.state_dict`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from reprise.errors import MismatchError
from trainer.interop.formats import listed
from trainer.interop.source import MOMENTS
from trainer.interop.torch_file import is_plain

Table = Mapping[Any, Any]
Key = TypeVar("Key", bound=Hashable)


def numbers_by_name(
    optimizer: Table,
    orders: Iterable[Sequence[Sequence[Key]]],
    shapes: Mapping[Key, Sequence[int]],
    *,
    program: str,
    where: object,
) -> dict[Key, Any]:
    """Return each parameter's number. The optimizer's entries must have its moments in its shape.

    Args:
        orders: Groups that the program may have made of the parameters. The first that fits counts.
        program: The program, for messages.

    Raises:
        MismatchError: No order has the optimizer's group sizes, or moments are missing or have another shape.
    """
    groups = [list(group.get("params", ())) for group in optimizer["param_groups"]]
    sizes, problems, tried = [len(group) for group in groups if group], list[str](), list[str]()
    for order in orders:
        filled = [group for group in order if group]
        tried.append(" and ".join(str(len(group)) for group in filled))
        if [len(group) for group in filled] == sizes:
            numbers = dict(zip(chain(*filled), chain(*groups), strict=True))
            entries = {name: optimizer["state"].get(number, {}) for name, number in numbers.items()}
            misfits = moment_problems(entries, shapes)
            if not misfits:
                return numbers
            problems = problems or misfits
    require_moments_of(problems, where=where)
    raise MismatchError(
        f"The moments cannot be matched to parameters: {program} stores them by number",
        where=where,
        expected=f"groups of {', or of '.join(tried)} parameters",
        found=f"groups of {' and '.join(map(str, sizes))}",
        fix="Parameters that were frozen must be listed in train.freeze, and others grouped as that program does. Or "
        "import the weights alone with --weights-only.",
    )


def moment_problems(entries: Mapping[Key, Table], shapes: Mapping[Key, Sequence[int]]) -> list[str]:
    """Return a line for each parameter without moments in its shape."""
    problems = list[str]()
    for name, shape in shapes.items():
        moments = [entries.get(name, {}).get(key) for key in MOMENTS]
        if not all(is_plain(moment) and tuple(moment.shape) == tuple(shape) for moment in moments):
            problems.append(f"{name}: no {' and '.join(MOMENTS)} of shape {list(shape)}")
    return problems


def require_moments_of(problems: Sequence[str], *, where: object) -> None:
    """Refuse an optimizer whose moments do not fit.

    Raises:
        MismatchError: There are problems. The error lists them.
    """
    if problems:
        raise MismatchError(
            "The optimizer's moments do not fit the model",
            where=where,
            found=listed(problems, "problem"),
            fix="It was saved before the first step, or by another optimizer than AdamW. Import the weights alone with "
            "--weights-only.",
        )
