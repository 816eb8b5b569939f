"""Names AdamW state keyed by parameter number, as in `Optimizer.state_dict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reprise.errors import MismatchError
from trainer.interop.formats import common_step, listed
from trainer.interop.torch_file import is_plain

Table = Mapping[Any, Any]

MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"


def entries_by_name(optimizer: Table, order: Sequence[str]) -> dict[str, Table]:
    """Return the optimizer entry for each parameter with state.

    Args:
        order: The parameter names, in the order of the optimizer's groups.
    """
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    state = optimizer["state"]
    return {name: state[at] for name, at in zip(order, numbers, strict=True) if at in state}


def unknown_order(program: str, groups: Sequence[Table], *, expected: str, fix: str, where: object) -> MismatchError:
    """Return an error for groups whose parameters are uncertain."""
    return MismatchError(
        f"The moments cannot be matched to parameters: {program} stores them by number",
        where=where,
        expected=expected,
        found=f"groups of {' and '.join(str(len(group.get('params', ()))) for group in groups)}",
        fix=f"{fix} Import the weights alone with --weights-only.",
    )


def check_moments(entries: Mapping[str, Table], shapes: Mapping[str, Sequence[int]], *, where: Path) -> None:
    """Refuse entries lacking a parameter's moments in its shape, or whose step counts differ.

    Raises:
        MismatchError: Moments are missing or have another shape. The error lists the parameters.
        CheckpointError: The step counts differ.
    """
    problems = list[str]()
    for name, shape in shapes.items():
        moments = [entries.get(name, {}).get(key) for key in MOMENTS]
        if not all(is_plain(moment) and tuple(moment.shape) == tuple(shape) for moment in moments):
            problems.append(f"{name}: no {' and '.join(MOMENTS)} of shape {list(shape)}")
    if problems:
        raise MismatchError(
            "The optimizer's moments do not fit the model",
            where=where,
            found=listed(problems, "problem"),
            fix="It was saved before the first step, or by another optimizer than AdamW. Import the weights alone with "
            "--weights-only.",
        )
    common_step((entry.get(STEP) for entry in entries.values()), where=where)


def steps_of(entry: Table) -> float:
    """Return a parameter's step count."""
    return common_step([entry.get(STEP)], where=STEP) or 0.0
