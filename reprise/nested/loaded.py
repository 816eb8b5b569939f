"""The result of a load: the values that it read, and the names that either side lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from reprise.errors import ConfigError
from reprise.format.layout import TensorSpec
from reprise.loading.loader import check_tensors
from reprise.loading.reader import Checkpoint, read_places
from reprise.tensors.live import LiveTensor

_log = logging.getLogger(__name__)

# Which names that only one side has are refused: all, those that the checkpoint lacks, none.
Strictness = bool | Literal["missing"]

_MOST_NAMED = 5


def check_strict(strict: object) -> None:
    """Refuse what is no `Strictness`: a text with a slip in it would refuse less than was meant.

    Raises:
        ConfigError: naming it.
    """
    if type(strict) is not bool and strict != "missing":
        raise ConfigError("`strict` has no such value", expected='True, False or "missing"', found=repr(strict))


class LoadedState(dict[str, Any]):
    """The values that a load returns, with the names that one side lacks, where the load did not refuse them.

    Attributes:
        missing_keys: names that this rank asked for and the checkpoint does not have: their values were kept.
        unexpected_keys: names that the checkpoint has and no rank asked for.
    """

    def __init__(
        self, values: Mapping[str, Any], missing_keys: Sequence[str] = (), unexpected_keys: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a load, under the names that they have in the checkpoint, and the names that either side lacks."""

    live: Sequence[LiveTensor]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def log(self, checkpoint: Checkpoint, *, is_first: bool) -> None:
        """Log the names that either side lacks.

        Args:
            is_first: whether this is the one rank that logs what is the same on all.
        """
        if self.unexpected and is_first:
            found = f"{len(self.unexpected)} tensors that nothing given has: {_first(self.unexpected)}"
            _log.warning(f"not loaded from {checkpoint.path}: {found}")
        if self.missing:
            found = f"{len(self.missing)} names, which keep their values: {_first(self.missing)}"
            _log.warning(f"not in {checkpoint.path}: {found}")


def match(
    checkpoint: Checkpoint,
    tensors: Sequence[LiveTensor],
    *,
    strict: Strictness,
    is_asked: Callable[[TensorSpec], bool],
    others: Collection[str] = (),
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
) -> Matched:
    """Find each tensor in a checkpoint, by its name or as another name of a tied one.

    Args:
        strict: which names that one side lacks are refused.
        is_asked: whether a tensor of the checkpoint is one of those that the load is about.
        others: names that other ranks ask for.
        missing: further names that the checkpoint lacks, of what is no tensor.
        unexpected: further names that nobody asks for.

    Raises:
        MismatchError: listing every difference in shape or dtype, and every name that is refused.
    """
    places, aliases = read_places(checkpoint), checkpoint.manifest.aliases
    stored = [aliases.get(tensor.spec.name, tensor.spec.name) for tensor in tensors]
    found = [
        replace(tensor, spec=replace(tensor.spec, name=name)) for tensor, name in zip(tensors, stored, strict=True)
    ]
    wanted = {*stored, *(aliases.get(name, name) for name in others)}
    unasked = [name for name, place in places.items() if name not in wanted and is_asked(place.spec)]
    unexpected = [*unasked, *unexpected]
    if strict:
        problems = [f"{name} is missing" for name in missing]
        if strict is True:
            problems += [f"{name} is unexpected" for name in unexpected]
        check_tensors(
            [tensor.spec for tensor in found], places, where=checkpoint.path, is_partial=True, further=problems
        )
        return Matched(found, unexpected=unexpected)
    there = [tensor for tensor in found if tensor.spec.name in places]
    check_tensors([tensor.spec for tensor in there], places, where=checkpoint.path, is_partial=True)
    absent = [t.spec.name for t, name in zip(tensors, stored, strict=True) if name not in places]
    return Matched(there, [*absent, *missing], unexpected)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
