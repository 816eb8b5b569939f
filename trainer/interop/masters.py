"""Compares an optimizer's float32 copy of a weight with the model's own weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reprise.errors import CheckpointError
from trainer.interop.finite import require_finite
from trainer.interop.stored import are_equal

Read = Callable[[], torch.Tensor]


def checked_master(weight: Read, master: Read, *, where: object, fix: str) -> torch.Tensor:
    """Return an optimizer's copy of a weight.

    Args:
        weight: Reads the weight in the model's dtype.
        master: Reads the optimizer's copy.

    Raises:
        CheckpointError: It does not round to the model's own weight.
    """
    copy, parameter = master(), weight()  # the larger is read while the other is not in memory
    if are_equal(copy, parameter, parameter.dtype):
        return copy
    require_finite(copy, where=where)  # NaN is never equal to itself
    require_finite(parameter, where=where)
    raise CheckpointError(
        "The optimizer's copy of a weight differs from the model's",
        where=where,
        expected=f"the same numbers, rounded to {parameter.dtype}",
        found=f"{int((copy.to(parameter.dtype) != parameter).count_nonzero())} of {parameter.numel()} differ",
        fix=fix,
    )
