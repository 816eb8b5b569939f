"""Finds NaN and infinity in tensors of other programs: no run may begin with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from reprise.errors import CheckpointError
from reprise.format import Box, whole

_ITEMS = 1 << 20  # looked at at once


class FiniteCheck:
    """Counts the non-finite numbers of a tensor, or of a part of it, given part by part in C order."""

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._first: tuple[int, float] | None = None

    def add(self, values: torch.Tensor) -> None:
        """Check the next numbers, a floating-point tensor on the CPU."""
        flat = values.detach().reshape(-1)
        for lo in range(0, flat.numel(), _ITEMS):
            part = flat[lo : lo + _ITEMS]
            is_odd = ~part.isfinite()
            count = int(is_odd.count_nonzero())
            if count and self._first is None:
                at = int(is_odd.int().argmax())
                self._first = self._seen + lo + at, float(part[at])
            self.count += count
        self._seen += flat.numel()

    def require_all(self, box: Box, view: Sequence[int], shape: Sequence[int], *, where: object) -> None:
        """Refuse the tensor if any number was not finite.

        Args:
            box: the checked box of the tensor, in the dimensions of `view`.
            shape: other dimensions of the same numbers in C order, for the reported index.

        Raises:
            CheckpointError: naming their number, and the index and value of the first.
        """
        if self._first is None:
            return
        first, value = self._first
        inside = np.unravel_index(first, box.shape)
        flat = np.ravel_multi_index([int(i) + o for i, o in zip(inside, box.offset, strict=True)], view) if view else 0
        index = [int(n) for n in np.unravel_index(int(flat), shape)]
        raise CheckpointError(
            "A tensor holds numbers that are not finite",
            where=where,
            found=f"{self.count} of {self._seen}, the first at {index}: {value}",
            fix="A model with such a weight computes nothing but NaN. Take an earlier checkpoint of the program that "
            "wrote it, or repair the tensor there.",
        )


def require_finite(tensor: torch.Tensor, *, where: object) -> None:
    """Refuse a tensor with NaN or infinity.

    Raises:
        CheckpointError: naming their number, and the index and value of the first.
    """
    if tensor.is_floating_point():
        check = FiniteCheck()
        check.add(tensor)
        check.require_all(whole(tensor.shape), tensor.shape, tensor.shape, where=where)
