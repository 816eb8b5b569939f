"""Finds NaN and infinity in other programs' tensors: a run must not start with them."""

from __future__ import annotations

import numpy as np
import torch

from reprise.errors import CheckpointError
from reprise.format import Box, TensorSpec

_ITEMS = 1 << 20  # elements checked at once


def require_finite(tensor: torch.Tensor, *, where: object, part: tuple[TensorSpec, Box] | None = None) -> None:
    """Refuse a tensor with NaN or infinity.

    Args:
        part: A larger tensor's spec and the box in its view, if `tensor` is only that box.

    Raises:
        CheckpointError: There are such numbers. The error has their count, and the first number's index and value.
    """
    flat, count, first = tensor.detach().reshape(-1), 0, -1
    for lo in range(0, flat.numel(), _ITEMS):
        is_odd = ~flat[lo : lo + _ITEMS].isfinite()
        count += (added := int(is_odd.count_nonzero()))
        if added and first < 0:
            first = lo + int(is_odd.int().argmax())
    if first < 0:
        return
    shape, at = tuple(tensor.shape), first
    if part is not None:
        spec, box = part
        inside = (int(i) + lo for i, lo in zip(np.unravel_index(first, box.shape), box.offset, strict=True))
        shape, at = spec.shape, int(np.ravel_multi_index(tuple(inside), spec.view))
    raise CheckpointError(
        "A tensor holds non-finite numbers",
        where=where,
        found=f"{count} of {flat.numel()}, the first at {[int(n) for n in np.unravel_index(at, shape)]}: "
        f"{float(flat[first])}",
        fix="A model with such a weight computes only NaN. Import an earlier checkpoint, or repair the tensor "
        "in the program that wrote it.",
    )
