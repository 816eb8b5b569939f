"""Compares two runs' computation in the same iterations, tensor by tensor, from their ranks' records.

A record is a folder with two files per rank: `rank0.jsonl` has a line per tensor, `rank0.bin` the stored values.
Logical tensors (parameters, gradients, optimizer state) are recorded box by box, with digests adding up to the same sum
for any cut. Activations are recorded as on each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
        name: The name of a module, stored tensor or figure.
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
        return json.dumps(astuple(self), separators=(",", ":"))


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
        largest: The largest absolute difference, infinite with a NaN on either side. None without both sides' values.
    """

    place: StepPlace
    detail: str
    largest: float | None = None


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
            place, order = record.pop("place"), (header["stage"], header["tensor_rank"], record.pop("call"), number)
            record.update({name: tuple(record[name]) for name in ("shape", "offset", "tensor_shape")})
            part = StepPart(rank, order, folder / VALUES.format(rank), **record)
            parts.setdefault(StepPlace(*place), []).append(part)
    if len(headers) != (headers[0]["ranks"] if headers else -1):
        raise DataError("The folder lacks records from some ranks", where=folder, found=count_of(len(headers), "rank"))
    return StepRecord(headers[0], {place: sorted(parts[place], key=lambda part: part.order) for place in parts})


def first_difference(a: StepRecord, b: StepRecord) -> StepDifference | None:
    """Return the first differing tensor in A's computation order, or None if all are equal.

    Places missing in either record are skipped, and so are activations with another cut: a later place differs.
    """
    common = sorted(a.parts.keys() & b.parts.keys(), key=lambda place: _order(place, a.parts[place]))
    for place in common:
        sides = _pieces(a.parts[place]), _pieces(b.parts[place])
        for number, (x, y) in enumerate(zip(*sides, strict=True) if len(sides[0]) == len(sides[1]) else ()):
            forms = _form(x), _form(y)
            if forms[0] != forms[1]:
                return StepDifference(place, " and ".join(forms))
            if _digest(x) != _digest(y):
                part = f"part {number} of {len(sides[0])}; " if len(sides[0]) > 1 else ""
                return _sized(place, part, x, y)
    return None


def _order(place: StepPlace, parts: Sequence[StepPart]) -> tuple[int, ...]:
    """Return a place's position in an iteration. Later pipeline stages come first in a backward pass."""
    stage, _, _, number = parts[0].order
    phase = PHASES.index(place.phase)
    return place.iteration, phase, place.micro, -stage if place.phase == "backward" else stage, number


# What is compared: a logical tensor's boxes together, or a rank's part of an activation.
Piece: TypeAlias = Sequence[StepPart]


def _pieces(parts: Sequence[StepPart]) -> list[Piece]:
    """Return the pieces to compare. Copies of an activation on all ranks are a single piece."""
    if parts[0].offset:
        return [[*{(part.offset, part.shape, part.digest): part for part in parts}.values()]]
    is_copied = len({(part.digest, part.shape) for part in parts}) == 1 < len({part.rank for part in parts})
    return [[part] for part in (parts[:1] if is_copied else parts)]


def _form(piece: Piece) -> str:
    return f"{piece[0].dtype} {list(piece[0].tensor_shape or piece[0].shape)}"


def _digest(piece: Piece) -> str | int:
    """Return a piece's digest. A logical tensor's is the sum over its boxes, and differs if a box's replicas do."""
    return sum(int(part.digest, 16) for part in piece) % _MODULO if piece[0].offset else piece[0].digest


def _values(piece: Piece) -> torch.Tensor | None:
    """Return a piece's values, joined from its boxes. None if any values were not stored."""
    import torch

    tensor = torch.zeros(piece[0].tensor_shape or piece[0].shape, dtype=getattr(torch, piece[0].dtype))
    for part in piece:
        values = part.values()
        if values is None:
            return None
        tensor[tuple(slice(at, at + size) for at, size in zip(part.offset, part.shape, strict=False))] = values
    return tensor


def _sized(place: StepPlace, detail: str, a: Piece, b: Piece) -> StepDifference:
    """Return a difference with its size, if the values were stored."""
    import torch

    if place.what == "value":
        numbers = [float.fromhex(piece[0].digest) for piece in (a, b)]
        return StepDifference(place, "{!r} and {!r}".format(*numbers), abs(numbers[0] - numbers[1]))
    values_a, values_b = _values(a), _values(b)
    if values_a is None or values_b is None:
        return StepDifference(place, f"{detail}the values were not stored: record both with --values '{place.key}'")
    bits = getattr(torch, BITS[values_a.itemsize])
    differs = values_a.reshape(-1).view(bits) != values_b.reshape(-1).view(bits)
    if not differs.any():
        return StepDifference(place, f"{detail}ranks hold the same part with different values")
    x, y = (values.reshape(-1)[differs].double() for values in (values_a, values_b))
    largest = float((x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
    first = [*map(int, torch.unravel_index(differs.nonzero()[0, 0], values_a.shape))] if values_a.ndim else []
    values = f"{_form(a)}, {float(x[0]):.9g} and {float(y[0]):.9g} at {first}"
    counts = f"{len(x)} of {values_a.numel()} values differ, by at most {largest:.3g}"
    return StepDifference(place, f"{counts}: {detail}{values}", largest)
