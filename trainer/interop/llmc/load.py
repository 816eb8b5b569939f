"""Reads tensors of a weight file of llm.c, box by box, as float32 in the stored layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reprise.layout import Box, Place, TensorKind, TensorSpec, in_bytes, stored_dtype
from reprise.live_tensors import LiveTensor
from reprise.reading import Gatherer, LoadReport, Target, open_tensor_file
from trainer.interop.finite import FiniteCheck
from trainer.interop.floats import read_floats
from trainer.interop.llmc.contents import LlmcForm, LlmcTensor
from trainer.interop.llmc.file import WeightsFile


@dataclass(frozen=True, slots=True)
class _Run:
    """A box of a tensor in a file, and the mapping of its coordinates to the stored layout.

    Args:
        view: the shape in whose coordinates `box` is.
        order: permutation of its dimensions into the stored order.
        row: first stored row, for rows at other positions in the file; None for equal coordinates.
    """

    view: tuple[int, ...]
    box: Box
    order: tuple[int, ...]
    row: int | None = None

    def to_stored(self, piece: Box) -> Box:
        """Return a part of `box` in stored coordinates."""
        if self.row is None:
            return Box(*(tuple(numbers[dim] for dim in self.order) for numbers in (piece.offset, piece.shape)))
        _, first, _, column = piece.offset
        return Box((self.row + first - self.box.offset[1], column), (piece.shape[1], piece.shape[3]))


def fill(
    file: WeightsFile, live: Sequence[LiveTensor], *, progress: Callable[[int], None] = lambda _: None
) -> LoadReport:
    """Fill each float32 box of `live`.

    Args:
        progress: called with the number of bytes filled since its last call.

    Raises:
        CheckpointError: if the file cannot be read, or ends early.
    """
    start, gatherer = time.perf_counter(), Gatherer()
    filled_bytes, dtype = 0, stored_dtype(file.dtype, where=file.path)
    with open_tensor_file(file.files, file.path.resolve()) as source:
        for tensor in sorted(live, key=lambda tensor: file.parts[tensor.spec.name][1]):
            part, offset = file.parts[tensor.spec.name]
            target = Target(tensor, tensor.box)
            for run in _runs(part, tensor.spec.view, tensor.box):
                place = Place(TensorSpec(TensorKind.MODEL, part.name, run.view, dtype, run.view), "", offset)
                check = FiniteCheck()
                for piece, values in read_floats(source, place, run.box, gatherer=gatherer):
                    check.add(torch.from_numpy(values))
                    stored_box = run.to_stored(piece)
                    memory = np.ascontiguousarray(values.transpose(run.order)).reshape(-1).view(np.uint8)
                    box = in_bytes(stored_box, values.itemsize)
                    target.put(box, memory.reshape(box.shape))
                    filled_bytes += memory.size
                    progress(memory.size)
                check.require_all(run.box, run.view, run.view, where=f"{file.path}, {part.name}")
            target.finish()
    seconds = time.perf_counter() - start
    return LoadReport(len(live), len(live), source.read_bytes, filled_bytes, seconds)


def _runs(part: LlmcTensor, view: tuple[int, ...], box: Box) -> Iterator[_Run]:
    """Yield the reads to fill a box of a stored tensor of shape `view`."""
    if not box.numel:
        return
    match part.form:
        case LlmcForm.plain:
            yield _Run(view, box, tuple(range(len(view))))
        case LlmcForm.transposed:  # the first stored dimension is the last in the file
            last = len(view) - 1
            file_box = Box((*box.offset[1:], box.offset[0]), (*box.shape[1:], box.shape[0]))
            yield _Run((*view[1:], view[0]), file_box, (last, *range(last)))
        case LlmcForm.interleaved:  # stored rows of a head: the even rows of the file, then the odd ones
            rows = view[0] // part.heads
            half = rows // 2
            for block in range(box.offset[0] // half, -(-box.end[0] // half)):
                head, which = divmod(block, 2)
                lo, hi = max(box.offset[0], block * half), min(box.end[0], (block + 1) * half)
                offset = (head, lo - block * half, which, box.offset[1])
                yield _Run(
                    (part.heads, half, 2, view[1]), Box(offset, (1, hi - lo, 1, box.shape[1])), (0, 1, 2, 3), row=lo
                )
