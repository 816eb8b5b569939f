"""The result of a load: its values, and the names missing on either side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from reprise.errors import ConfigError, count_of
from reprise.format.layout import TensorSpec
from reprise.loading.loader import check_tensors
from reprise.loading.reader import Checkpoint, read_places
from reprise.nested.stored_names import Keys, keys_of, keys_of_pointer
from reprise.tensors.live import LiveTensor

_log = logging.getLogger(__name__)

# Which names that only one side has are refused: all, those that the checkpoint lacks, those of modules, none.
Strictness = bool | Literal["missing", "model"]

_MOST_NAMED = 5


def check_strict(strict: object) -> None:
    """Refuse what is no `Strictness`: a text with a slip in it would refuse less than was meant.

    Raises:
        ConfigError: naming it.
    """
    if type(strict) is not bool and strict not in ("missing", "model"):
        expected = 'True, False, "missing" or "model"'
        raise ConfigError("`strict` has no such value", expected=expected, found=repr(strict))


class LoadedState(dict[str, Any]):
    """The values returned by a load, with the names missing on a side, where the load did not refuse them.

    Attributes:
        missing_keys: names requested by this rank and missing in the checkpoint: their values were kept.
        unexpected_keys: names in the checkpoint requested by no rank.
    """

    def __init__(
        self, values: Mapping[str, Any], missing_keys: Sequence[str] = (), unexpected_keys: Sequence[str] = ()
    ) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a load, under their names in the checkpoint, and the names missing on either side."""

    live: Sequence[LiveTensor]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def log(self, checkpoint: Checkpoint, *, is_first: bool) -> None:
        """Log the names missing on either side.

        Args:
            is_first: whether this rank logs the lines common to all ranks.
        """
        if self.unexpected and is_first:
            text = f"{count_of(len(self.unexpected), 'tensor')} that nothing given has: {_first(self.unexpected)}"
            _log.warning(f"not loaded from {checkpoint.path}: {text}")
        if self.missing:
            keep = "keeps its value" if len(self.missing) == 1 else "keep their values"
            text = f"{count_of(len(self.missing), 'name')}, which {keep}: {_first(self.missing)}"
            _log.warning(f"not in {checkpoint.path}: {text}")


def match(
    checkpoint: Checkpoint,
    tensors: Sequence[LiveTensor],
    *,
    strict: Strictness,
    models: Collection[Keys],
    is_asked: Callable[[TensorSpec], bool],
    requested_names: Collection[str] = (),
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
) -> Matched:
    """Find each tensor in a checkpoint, by its name or by another name of a tied tensor.

    Args:
        strict: which names missing on a side are refused.
        models: the keys of modules.
        is_asked: whether the load is about a tensor of the checkpoint.
        requested_names: names requested by other ranks.
        missing: further names missing in the checkpoint, of values without tensors.
        unexpected: further names requested by nobody.

    Raises:
        MismatchError: listing every difference in shape or dtype, and every refused name.
    """
    places, aliases = read_places(checkpoint), checkpoint.manifest.aliases
    stored = [aliases.get(tensor.spec.name, tensor.spec.name) for tensor in tensors]
    renamed = [
        replace(tensor, spec=replace(tensor.spec, name=name)) for tensor, name in zip(tensors, stored, strict=True)
    ]
    requested = {*stored, *(aliases.get(name, name) for name in requested_names)}
    unasked = {name: place.spec for name, place in places.items() if name not in requested and is_asked(place.spec)}

    def is_refused(keys: Keys) -> bool:
        return strict is not False and (strict != "model" or any(keys[: len(model)] == model for model in models))

    problems = [f"{name} is missing" for name in missing if is_refused(keys_of_pointer(name))]
    if strict != "missing":
        keys_by_name = {name: keys_of(spec.kind, name) for name, spec in unasked.items()}
        keys_by_name |= {name: keys_of_pointer(name) for name in unexpected}
        problems += [f"{name} is unexpected" for name, keys in keys_by_name.items() if is_refused(keys)]
    lacking_specs = [tensor.spec for tensor, name in zip(tensors, stored, strict=True) if name not in places]
    lenient_names = {spec.name for spec in lacking_specs if not is_refused(keys_of(spec.kind, spec.name))}
    present = [new for new, tensor in zip(renamed, tensors, strict=True) if tensor.spec.name not in lenient_names]
    check_tensors([tensor.spec for tensor in present], places, where=checkpoint.path, is_partial=True, further=problems)
    return Matched(present, [*(spec.name for spec in lacking_specs), *missing], [*unasked, *unexpected])


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
