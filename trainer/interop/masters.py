"""Compares an optimizer's float32 copy of a weight with the model's own weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

from reprise.errors import CheckpointError
from trainer.interop.finite import require_finite

Read = Callable[[], torch.Tensor]


def rounding_to(weight: Read, master: Read) -> torch.Tensor | None:
    """Return an optimizer's copy of a weight, or None if it does not round to the model's own.

    Digests are compared first. If they agree, only a single tensor is in memory at a time.

    Args:
        weight: Reads the weight in the model's dtype.
        master: Reads the optimizer's copy.
    """
    digest, dtype = _digest(weight())
    copy = master()
    # Zeros may differ in sign.
    is_same = _digest(copy.to(dtype))[0] == digest or torch.equal(copy.to(dtype), weight())
    return copy if is_same else None


def checked_master(weight: Read, master: Read, *, where: object, fix: str) -> torch.Tensor:
    """Return an optimizer's copy of a weight. See `rounding_to`.

    Raises:
        CheckpointError: It does not round to the model's own weight.
    """
    if (copy := rounding_to(weight, master)) is not None:
        return copy
    parameter, copy = weight(), master()
    require_finite(copy, where=where)  # NaN is never equal to itself
    require_finite(parameter, where=where)
    raise CheckpointError(
        "The optimizer's copy of a weight differs from the model's",
        where=where,
        expected=f"the same numbers, rounded to {parameter.dtype}",
        found=f"{int((copy.to(parameter.dtype) != parameter).count_nonzero())} of {parameter.numel()} differ",
        fix=fix,
    )


def _digest(tensor: torch.Tensor) -> tuple[bytes, torch.dtype]:
    data: memoryview = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()  # type: ignore[assignment]
    return xxhash.xxh3_128(data).digest(), tensor.dtype
