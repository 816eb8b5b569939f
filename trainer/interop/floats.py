"""Reads a box of a tensor of any floating-point dtype as float32, part by part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from reprise.format import Box, Place, absolute, extent
from reprise.loading import Gatherer, OpenFile
from reprise.tensors import torch_dtype

ITEMS = 1 << 20  # read and cast at once


def read_floats(
    file: OpenFile, place: Place, box: Box, *, gatherer: Gatherer
) -> Iterator[tuple[Box, npt.NDArray[np.float32]]]:
    """Yield the parts of `box`, a box of the view of `place`, in order, each with its values.

    Raises:
        CheckpointError: if the file ends early.
    """
    packed, size = place.spec.image(box), place.spec.dtype.itemsize
    for lo in range(0, box.numel, ITEMS):
        hi = min(lo + ITEMS, box.numel)
        data = np.empty((hi - lo) * size, dtype=np.uint8)
        gatherer.gather(file.read, packed, lo * size, data, offset=place.offset)
        values = torch.from_numpy(data).view(torch_dtype(place.spec.dtype)).to(torch.float32).numpy()
        at = 0
        for piece in extent(box.shape, lo, hi):
            yield absolute(piece, box), values[at : at + piece.numel].reshape(piece.shape)
            at += piece.numel
