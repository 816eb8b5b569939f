"""Finds parameters in the unnamed flat buffers of Megatron's distributed optimizer.

A buffer holds a stage's parameters in buckets, in reverse `model.parameters()` order. A parameter starts at a multiple
of 64 elements in its bucket or, in older versions, directly after its predecessor. Buckets are stored separately or end
to end, with or without padding. Their size depends on run settings, so offsets cannot be computed. Instead, the
buffer's master weights, rounded, must equal the model's own weights, parameter by parameter. Moments lie at the same
offsets as the master weights.

Sources: `_compute_per_buffer_param_layout` and `get_parameter_state_dp_zero` in `distrib_optimizer.py`, and
`param_and_grad_buffer.py`, in `megatron/core`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from reprise.errors import CheckpointError, MismatchError
from trainer.interop.finite import require_finite
from trainer.interop.stored import FileTensor, are_equal

_ALIGNMENT, _MOST_PADDING = 64, 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class Bucket:
    """A tensor of one dimension.

    Args:
        size: The element count.
        dtype: Its dtype.
        read: Returns a slice.
    """

    size: int
    dtype: torch.dtype
    read: Callable[[slice], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: a bucket number, and its first element there."""

    bucket: int
    offset: int

    def take(self, buckets: Sequence[Bucket], shape: Sequence[int]) -> torch.Tensor:
        """Return a view of the parameter in the buckets."""
        return buckets[self.bucket].read(slice(self.offset, self.offset + prod(shape))).view(*shape)


@dataclass(frozen=True, slots=True)
class _End:
    """A search state: where a parameter ends in a stored bucket, and where the run's bucket starts, modulo 64."""

    bucket: int
    offset: int
    base: int

    def next(self, buckets: Sequence[Bucket], count: int) -> list[_End]:
        """Return the places where the next parameter may start, which has `count` elements."""
        aligned = self.offset + (self.base - self.offset) % _ALIGNMENT
        starts = [_End(self.bucket, aligned, self.base)]
        if aligned != self.offset:  # the run's bucket ends here, or parameters are not aligned
            starts.append(_End(self.bucket, self.offset, self.offset % _ALIGNMENT))
        room = buckets[self.bucket].size - self.offset
        if self.bucket + 1 < len(buckets) and self.offset and room <= max(count, _MOST_PADDING):
            starts.append(_End(self.bucket + 1, 0, 0))
        return starts


def locate(
    parameters: Mapping[str, FileTensor], buckets: Sequence[Bucket], *, is_padded: bool, where: object
) -> dict[str, Slot]:
    """Return every parameter's place in the master weight buckets.

    Args:
        parameters: A stage's parameters on one rank, in `model.parameters()` order.
        buckets: One buffer's float32 master weights, in order.
        is_padded: Whether padding may follow the last parameter.

    Raises:
        CheckpointError: No possible place holds a parameter's weights, or the buffer is too long.
        MismatchError: Several places hold a parameter's weights, so its moments are uncertain.
    """
    backwards = list(parameters.items())[::-1]
    reached: dict[_End, tuple[Slot, ...]] = {_End(0, 0, 0): ()}
    for name, piece in backwards:
        candidates, count = dict[_End, list[tuple[Slot, ...]]](), prod(piece.shape)
        for end, slots in reached.items():
            for start in end.next(buckets, count):
                candidates.setdefault(start, []).append((*slots, Slot(start.bucket, start.offset)))
        fitting = {start: slots for start, slots in candidates.items() if _holds(buckets, start, piece)}
        if not fitting:
            require_finite(piece.read(), where=name)  # NaN is never equal to itself
            places = " or ".join(f"{start.offset} of bucket {start.bucket}" for start in candidates)
            raise CheckpointError(
                "The optimizer's buffer does not hold a parameter's weights at any expected position",
                where=f"{where}, {name}",
                expected=f"{count} numbers that round to the model's weights, at {places}",
                fix="The files come from different saves, or a version with another buffer layout. Save it with "
                "--dist-ckpt-optim-fully-reshardable, or import the weights alone with --weights-only.",
            )
        if any(len(slots) > 1 for slots in fitting.values()):
            raise _not_certain(where, name)
        reached = {_End(s.bucket, s.offset + count, s.base): slots[0] for s, slots in fitting.items()}
    last = len(buckets) - 1, buckets[-1].size
    ends = [slots for end, slots in reached.items() if is_padded or (end.bucket, end.offset) == last]
    if not ends:
        raise CheckpointError(
            "The optimizer's buffer is longer than its parameters",
            where=where,
            expected=f"{sum(prod(piece.shape) for piece in parameters.values())} numbers and the gaps between them",
            found=sum(bucket.size for bucket in buckets),
            fix="The files come from different saves. Import the weights alone with --weights-only.",
        )
    if len(ends) > 1:
        raise _not_certain(where, backwards[-1][0])
    return {name: slot for (name, _), slot in zip(backwards, ends[0], strict=True)}


def _holds(buckets: Sequence[Bucket], start: _End, piece: FileTensor) -> bool:
    is_inside = start.offset + prod(piece.shape) <= buckets[start.bucket].size
    slot = Slot(start.bucket, start.offset)
    return is_inside and are_equal(slot.take(buckets, piece.shape), piece.read(), piece.dtype)


def _not_certain(where: object, name: str) -> MismatchError:
    return MismatchError(
        "A parameter's position in the optimizer's buffer is ambiguous",
        where=f"{where}, {name}",
        found="the same weights at several possible positions",
        fix="Import the weights alone with --weights-only.",
    )
