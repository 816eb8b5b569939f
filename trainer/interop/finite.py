"""Finds NaN and infinity in other programs' tensors: a run must not start with them."""

from __future__ import annotations

import torch

from reprise.errors import CheckpointError

_ITEMS = 1 << 20  # elements checked at once


def require_finite(tensor: torch.Tensor, *, where: object) -> None:
    """Refuse a tensor with NaN or infinity.

    Raises:
        CheckpointError: There are such numbers. The error has their count.
    """
    parts = torch.split(tensor.detach().reshape(-1), _ITEMS)
    if count := sum(int((~part.isfinite()).count_nonzero()) for part in parts):
        raise CheckpointError(
            "A tensor holds non-finite numbers",
            where=where,
            found=f"{count} of {tensor.numel()}",
            fix="A model with such a weight computes only NaN. Import an earlier checkpoint, or repair the tensor "
            "in the program that wrote it.",
        )
