"""Assigns DeepSpeed's numbered moments to parameters, or refuses them.

Stage 0 keeps the optimizer's state by number, in the order in which the user passed the parameters. Shapes do not
determine the order: layers have equal shapes. A name is taken only from the first available of these:

* the list given by the user;
* the names kept by torch in the groups of an optimizer made from `named_parameters()`;
* the float32 copies of the weights beside the moments: rounded, each has the bits of a weight of the model;
* a shape of a single parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from reprise.errors import MismatchError, count_of

_Mark = tuple[tuple[int, ...], torch.dtype | None, int]

_MOST_NAMED = 5
WAYS_OUT = (
    "Name the parameters in the optimizer's order, one a line, in a file for --optimizer-names=FILE; the section on "
    "DeepSpeed in docs/interop.md has the three lines of Python that write it, without training. Or take the weights "
    "alone with --weights-only."
)


@dataclass(frozen=True, slots=True)
class Numbered:
    """The optimizer's parameters by number.

    Args:
        shapes: of the moments of each.
        copies: the float32 copy of each parameter's weights, or nothing if there are none.
        recorded: the recorded name of each, or None without a name.
    """

    shapes: Sequence[tuple[int, ...]]
    copies: Sequence[torch.Tensor]
    recorded: Sequence[str] | None


def names_of(
    numbered: Numbered,
    weights: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    listed_names: Sequence[str] | None,
    *,
    where: object,
) -> list[str]:
    """Return the name of every numbered parameter.

    Args:
        weights: the model's weights by name, a shared weight once.
        shared: second names of shared weights, with the first.
        listed_names: the names listed by the user.

    Raises:
        MismatchError: if a name is not certain, or the listed names do not fit.
    """
    stated, origin = (
        (listed_names, "--optimizer-names") if listed_names is not None else (numbered.recorded, "param_names")
    )
    if stated is None:
        return _certain_names(numbered, weights, where=where)
    names = [shared.get(name, name) for name in stated]
    problems = _name_problems(names, numbered, weights)
    if problems:
        raise MismatchError(
            "The names of the optimizer's parameters are not those of the checkpoint",
            where=f"{where}, {origin}",
            expected=f"the {len(numbered.shapes)} parameters that the optimizer has, in its order",
            found=_listed(problems),
            fix=WAYS_OUT,
        )
    return names


def _name_problems(names: Sequence[str], numbered: Numbered, weights: Mapping[str, torch.Tensor]) -> list[str]:
    if len(names) != len(numbered.shapes):
        return [count_of(len(names), "name")]
    problems = [f"{name} {count} times" for name, count in Counter(names).items() if count > 1]
    for number, (name, shape) in enumerate(zip(names, numbered.shapes, strict=True)):
        if name not in weights:
            problems.append(f"number {number}: {name}, which the model does not have")
        elif tuple(weights[name].shape) != shape:
            problems.append(f"number {number}: {name} is {list(weights[name].shape)}, the moments are {list(shape)}")
    return problems


def _certain_names(numbered: Numbered, weights: Mapping[str, torch.Tensor], *, where: object) -> list[str]:
    """Return the names determined by shapes and, if there are copies, by bits."""
    by_mark, dtypes = defaultdict[_Mark, list[str]](list), sorted({t.dtype for t in weights.values()}, key=str)
    for name, tensor in weights.items():
        by_mark[_mark(tuple(tensor.shape), tensor if numbered.copies else None)].append(name)
    candidates = list[list[str]]()
    for number, shape in enumerate(numbered.shapes):
        rounded = (numbered.copies[number].detach().to(dtype) for dtype in dtypes) if numbered.copies else (None,)
        candidates.append([name for rounded_copy in rounded for name in by_mark.get(_mark(shape, rounded_copy), ())])
    times = Counter(names[0] for names in candidates if len(names) == 1)
    problems = [
        f"number {number}, {list(shape)}: {_candidates(names)}"
        for number, (shape, names) in enumerate(zip(numbered.shapes, candidates, strict=True))
        if len(names) != 1 or times[names[0]] > 1
    ]
    if problems:
        raise MismatchError(
            "It is not certain which moments belong to which parameter: at stage 0 DeepSpeed keeps them by number",
            where=where,
            expected="names in the file, or copies of the weights that tell them apart",
            found=_listed(problems),
            fix=WAYS_OUT,
        )
    return [names[0] for names in candidates]


def _mark(shape: tuple[int, ...], weights: torch.Tensor | None) -> _Mark:
    """Return a key to identify a parameter: its shape, and a digest of its bits if there are weights."""
    if weights is None:
        return shape, None, 0
    data = weights.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return shape, weights.dtype, xxhash.xxh3_128_intdigest(data)  # type: ignore[arg-type]


def _candidates(names: Sequence[str]) -> str:
    if not names:
        return "no parameter has this shape and these bits"
    listing = " or ".join(names[:_MOST_NAMED])
    return f"{listing}{f' or {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''}"


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    return f"{count_of(len(problems), 'problem')}: {'; '.join(problems[:_MOST_NAMED])}{more}"
