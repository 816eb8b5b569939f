"""Compares two runs' computation in the same iterations, tensor by tensor, from their ranks' records.

A record is a folder with two files per rank: `rank0.jsonl` has a line per tensor, `rank0.bin` the stored values.
Logical tensors (parameters, gradients, optimizer state) are recorded box by box, with digests adding up to the same sum
for any cut. Activations are recorded as on each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise.errors import DataError, count_of
from reprise.storage import matching

if TYPE_CHECKING:
    import torch

RECORDS, VALUES = "rank{}.jsonl", "rank{}.bin"
_MODULO = 1 << 64
BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # integer dtypes with a value's bits, by itemsize


# An iteration's phases, in the order in which differences spread.
PHASES = ("start", "forward", "backward", "gradient", "figures", "optimizer")


@dataclass(frozen=True, slots=True)
class StepPlace:
    """A compared tensor or number, with its place in an iteration.

    Args:
        micro: The micro-batch number within the iteration, over all ranks. -1 outside the passes.
        name: The name of a module, stored tensor or setting.
        what: `input`, `output`, `gradient of its output`, `weight`, a moment, or `value`.
    """

    iteration: int
    phase: str
    micro: int
    name: str
    what: str

    def __str__(self) -> str:
        batch = f", micro batch {self.micro}" if self.micro >= 0 else ""
        return f"iteration {self.iteration}, {self.phase}{batch}: {self.what} of {self.name}"

    @property
    def key(self) -> str:
        """Return the place as a single argument for `--values`."""
        return json.dumps([self.iteration, self.phase, self.micro, self.name, self.what], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class StepPart:
    """A rank's part of a tensor.

    Args:
        order: The pipeline stage, the tensor-parallel rank, the call number if a module runs several times, and the
            record number on the rank.
        offset, tensor_shape: The box's corner and the tensor's shape, for a logical tensor. Otherwise empty.
        at: The offset in `file` at which its values start. None if values were not stored.
    """

    rank: int
    order: tuple[int, int, int, int]
    file: Path
    place: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    digest: str
    at: int | None

    def values(self) -> torch.Tensor | None:
        """Return the values, or None if they were not stored."""
        import torch

        if self.at is None:
            return None
        dtype: torch.dtype = getattr(torch, self.dtype)
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        with open(self.file, "rb") as file:
            file.seek(self.at)
            data = bytearray(file.read(math.prod(self.shape) * dtype.itemsize))
        return torch.frombuffer(data, dtype=dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The records from all ranks in a run.

    Args:
        header: Rank 0's header: the run, its settings, and the first and last iteration.
        parts: Each place's parts, in order.
    """

    header: Mapping[str, Any]
    parts: Mapping[StepPlace, Sequence[StepPart]]

    def figures(self) -> dict[int, tuple[str, ...]]:
        """Return each iteration's loss and gradient norm, as hex."""
        figures = dict[int, tuple[str, ...]]()
        for place, parts in self.parts.items():
            if place.phase == "figures":
                figures[place.iteration] = (*figures.get(place.iteration, ()), parts[0].digest)
        return figures


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first differing tensor in two records.

    Args:
        detail: The differing dtypes, shapes or values, or two ranks of a single run with different replicas.
        differing, total: Value counts. `differing` is 0 if the values of either side were not stored.
        largest: The largest absolute difference, infinite with a NaN on either side. None without both sides' values.
        at: The first differing value's index in the logical tensor.
        equal: How many places before it, in comparison order, are equal.
    """

    place: StepPlace
    detail: str
    differing: int
    total: int
    largest: float | None
    at: tuple[int, ...]
    equal: int


def read_record(folder: Path) -> StepRecord:
    """Read the records in a folder.

    Raises:
        DataError: The folder has no records, or a rank's are incomplete.
    """
    headers, parts = list[dict[str, Any]](), dict[StepPlace, list[StepPart]]()
    for rank in range(len(matching(folder, RECORDS.format("*")))):
        path = folder / RECORDS.format(rank)
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            (header, *records, end) = lines
            if end != {"end": True}:
                raise ValueError(end)
        except (OSError, ValueError) as error:
            raise DataError("A rank's record is incomplete", where=path, fix="Record the run again.") from error
        headers.append(header)
        for number, record in enumerate(records):
            order = (header["stage"], header["tensor_rank"], record.pop("call"), number)
            members: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
            }
            part = StepPart(rank, order, file=folder / VALUES.format(rank), **members)
            parts.setdefault(StepPlace(*part.place), []).append(part)
    if len(headers) != (headers[0]["ranks"] if headers else -1):
        raise DataError("The folder lacks records from some ranks", where=folder, found=count_of(len(headers), "rank"))
    return StepRecord(headers[0], {place: sorted(parts[place], key=lambda part: part.order) for place in parts})


def first_difference(a: StepRecord, b: StepRecord) -> StepDifference | None:
    """Return the first differing tensor in A's computation order, or None if all are equal.

    Places missing in either record are skipped, see `unmatched`.
    """
    common = sorted(a.parts.keys() & b.parts.keys(), key=lambda place: _order(place, a.parts[place]))
    for equal, place in enumerate(common):
        difference = _compare(place, a.parts[place], b.parts[place], equal)
        if difference is not None:
            return difference
    return None


def unmatched(a: StepRecord, b: StepRecord) -> tuple[int, int]:
    """Return how many places only A has, and only B."""
    return len(a.parts.keys() - b.parts.keys()), len(b.parts.keys() - a.parts.keys())


def _order(place: StepPlace, parts: Sequence[StepPart]) -> tuple[int, int, int, int, int]:
    """Return a place's position in an iteration. Later pipeline stages come first in a backward pass."""
    stage, _, _, number = parts[0].order
    return (
        place.iteration,
        PHASES.index(place.phase),
        place.micro,
        -stage if place.phase == "backward" else stage,
        number,
    )


def _compare(place: StepPlace, a: Sequence[StepPart], b: Sequence[StepPart], equal: int) -> StepDifference | None:
    shape_a, shape_b = a[0].tensor_shape or a[0].shape, b[0].tensor_shape or b[0].shape
    if a[0].offset or a[0].tensor_shape:
        if shape_a != shape_b or a[0].dtype != b[0].dtype:
            return StepDifference(place, f"{_form(a[0])} and {_form(b[0])}", 0, 0, None, (), equal)
        for name, parts in (("A", a), ("B", b)):
            ranks = _unequal_replicas(parts)
            if ranks:
                detail = f"ranks {ranks[0].rank} and {ranks[1].rank} of {name} hold the same part with different values"
                return _sized(place, detail, ranks[0].values(), ranks[1].values(), math.prod(shape_a), equal)
        if _sum(a) == _sum(b):
            return None
        return _sized(place, "", _joined(a), _joined(b), math.prod(shape_a), equal)
    if place.what == "value":
        x, y = (float.fromhex(parts[0].digest) for parts in (a, b))
        if x.hex() == y.hex():
            return None
        return StepDifference(place, f"{x!r} and {y!r}", 1, 1, abs(x - y), (), equal)
    return _compare_activations(place, a, b, equal)


def _compare_activations(
    place: StepPlace, a: Sequence[StepPart], b: Sequence[StepPart], equal: int
) -> StepDifference | None:
    """Compare an activation's parts on all ranks: copies, equal parts, or parts along a single dimension."""
    a, b = _without_copies(a), _without_copies(b)
    if len(a) == len(b):
        for part, part_b in zip(a, b, strict=True):
            if (part.dtype, part.shape) != (part_b.dtype, part_b.shape):
                return StepDifference(place, f"{_form(part)} and {_form(part_b)}", 0, 0, None, (), equal)
            if part.digest != part_b.digest:
                detail = "" if len(a) == 1 else f"part {a.index(part)} of {len(a)}"
                return _sized(place, detail, part.values(), part_b.values(), math.prod(part.shape), equal)
        return None
    values_a, values_b = _along(a, b[0].shape), _along(b, a[0].shape)
    if values_a is None or values_b is None or values_a.shape != values_b.shape:
        return None  # these cuts cannot be joined; a later place shows a difference
    return _sized(place, "", values_a, values_b, values_a.numel(), equal)


def _without_copies(parts: Sequence[StepPart]) -> Sequence[StepPart]:
    """Return a single part if all ranks hold copies."""
    alike = {(part.digest, part.shape) for part in parts}
    return parts[:1] if len(alike) == 1 and len({part.rank for part in parts}) == len(parts) else parts


def _along(parts: Sequence[StepPart], like: tuple[int, ...]) -> torch.Tensor | None:
    """Join parts along the only dimension in which they are shorter than a shape. A single part needs no join."""
    import torch

    values = [value for part in parts if (value := part.values()) is not None]
    if len(values) != len(parts) or len(parts) == 1:
        return values[0] if len(values) == len(parts) else None
    shape = parts[0].shape
    dims = [dim for dim, (size, length) in enumerate(zip(shape, like, strict=False)) if size * len(parts) == length]
    return torch.cat(values, dims[0]) if len(dims) == 1 and len(shape) == len(like) else None


def _unequal_replicas(parts: Sequence[StepPart]) -> tuple[StepPart, StepPart] | tuple[()]:
    first = dict[tuple[tuple[int, ...], tuple[int, ...]], StepPart]()
    for part in parts:
        replica = first.setdefault((part.offset, part.shape), part)
        if replica.digest != part.digest:
            return replica, part
    return ()


def _boxes(parts: Sequence[StepPart]) -> list[StepPart]:
    return list({(part.offset, part.shape): part for part in parts}.values())


def _sum(parts: Sequence[StepPart]) -> int:
    """Return a logical tensor's digest, the sum of its boxes' digests."""
    return sum(int(part.digest, 16) for part in _boxes(parts)) % _MODULO


def _joined(parts: Sequence[StepPart]) -> torch.Tensor | None:
    """Return a logical tensor's values, joined from its boxes. None if any values were not stored."""
    import torch

    tensor = torch.zeros(parts[0].tensor_shape, dtype=getattr(torch, parts[0].dtype))
    for part in _boxes(parts):
        values = part.values()
        if values is None:
            return None
        tensor[tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape, strict=True))] = values
    return tensor


def _sized(
    place: StepPlace,
    detail: str,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    total: int,
    equal: int,
) -> StepDifference | None:
    """Return a difference with its size. None for values with equal bits, if digests were not comparable."""
    import torch

    if a is None or b is None:
        text = f"the values were not stored: record both with --values '{place.key}'"
        return StepDifference(place, f"{detail}; {text}" if detail else text, 0, total, None, (), equal)
    bits = getattr(torch, BITS[a.itemsize])
    differs = a.reshape(-1).view(bits) != b.reshape(-1).view(bits)
    x, y = (values.reshape(-1)[differs].double() for values in (a, b))
    if not len(x):
        return None
    largest = float((x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
    first = tuple(int(index) for index in torch.unravel_index(differs.nonzero()[0, 0], a.shape)) if a.ndim else ()
    form = f"{str(a.dtype).removeprefix('torch.')} {list(a.shape)}, {float(x[0]):.9g} and {float(y[0]):.9g}"
    text = "; ".join(filter(None, [detail, f"{form} at {list(first)}"]))
    return StepDifference(place, text, len(x), a.numel(), largest, first, equal)


def _form(part: StepPart) -> str:
    return f"{part.dtype} {list(part.tensor_shape or part.shape)}"


def described(difference: StepDifference) -> Iterator[str]:
    """Yield the lines describing a difference."""
    yield str(difference.place)
    if difference.largest is not None and difference.place.what != "value":
        yield (
            f"  {difference.differing} of {difference.total} values differ, by at most {difference.largest:.3g}: "
            f"{difference.detail}"
        )
    else:
        yield f"  {difference.detail}"
    before = "tensor or number before it has" if difference.equal == 1 else "tensors and numbers before it have"
    yield f"  {difference.equal} {before} equal bits"
