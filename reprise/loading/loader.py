"""Fills live tensors from a checkpoint, box by box, and verifies every block it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format.box import Box, extent, image, in_bytes, intersect, relative, whole
from reprise.format.host_file import union
from reprise.format.layout import Place, TensorSpec
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading.blocks import BlockReader, PieceBlock, Progress, blocks_in, host_memory
from reprise.loading.reader import Bytes, Checkpoint, read_places
from reprise.tensors.live import LiveTensor
from reprise.tensors.modes import overwrite, own_modes


@own_modes()
def fill(checkpoint: Checkpoint, live: Sequence[LiveTensor], *, progress: Progress = lambda _: None) -> None:
    """Read every box in `live` from the checkpoint into its live memory, and verify each block it touches.

    The tensors' version counters increase first, which makes autograd refuse a graph with their old values.

    Args:
        progress: See `BlockReader.run`. Called with the filled bytes.

    Raises:
        CheckpointError: A block is damaged. Names the file, tensor and bytes of the first in file order. Memory filled
            before stays filled.
        MismatchError: A sharded tensor was written with other dimensions. Nothing is filled.
    """
    targets = _targets_of(checkpoint, live)
    torch.autograd.graph.increment_version([target.tensor.local for target in targets])
    devices = {target.tensor.local.device for target in targets} - {torch.device("cpu")}
    for device in devices:  # reading threads do not copy on the caller's stream
        torch.accelerator.synchronize(device)
    reader = BlockReader(checkpoint, _blocks_of(targets), memory=_pinned_memory if devices else host_memory)
    done_bytes = reader.run(progress) if targets else 0
    total_bytes = sum(target.box.numel for target in targets)
    if done_bytes != total_bytes:
        raise CheckpointError(
            "The checkpoint is missing part of a tensor",
            where=checkpoint.path,
            expected=f"{total_bytes} B",
            found=f"{done_bytes} B",
        )
    for target in targets:
        target.finish()
    for device in devices:
        torch.accelerator.synchronize(device)


@own_modes()
def verify_blocks(checkpoint: Checkpoint, live: Sequence[LiveTensor], progress: Progress) -> None:
    """Verify each block that `fill` would read. Live memory does not change.

    Raises:
        CheckpointError: See `fill`.
        MismatchError: See `fill`.
    """
    if targets := _targets_of(checkpoint, live):
        blocks = (replace(block, into=None, move=None) for block in _blocks_of(targets))
        BlockReader(checkpoint, blocks).run(progress)


def _pinned_memory() -> Bytes:
    """Return pinned memory for a block, from which a device copies."""
    memory: Bytes = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _targets_of(checkpoint: Checkpoint, live: Sequence[LiveTensor]) -> list[Target]:
    """Return the memory to fill in file order."""
    places = read_places(checkpoint)
    targets = [Target(checkpoint, places[tensor.spec.name], tensor) for tensor in live if tensor.box.numel]
    return sorted(targets, key=lambda target: (target.place.file, target.place.offset))


def touched_pieces(checkpoint: Checkpoint, live: Sequence[LiveTensor]) -> dict[str, tuple[int, ...]]:
    """Return by tensor the piece numbers read by `fill` for these tensors.

    Raises:
        MismatchError: See `fill`.
    """
    targets = _targets_of(checkpoint, live)
    return union({block.place.spec.name: (block.number,)} for block in _blocks_of(targets))


def _blocks_of(targets: Sequence[Target]) -> Iterator[PieceBlock]:
    """Yield every block with a target's bytes, in file order."""
    for target in targets:
        yield from target.blocks()


class Target:
    """A live tensor's memory as bytes. Threads may fill disjoint parts.

    Attributes:
        box: The tensor's box, in bytes, in the dimensions it was written in.

    Raises:
        MismatchError: A sharded tensor was written in other dimensions.
    """

    def __init__(self, checkpoint: Checkpoint, place: Place, tensor: LiveTensor) -> None:
        self.tensor, self.place = tensor, place
        box, itemsize = _written_box(checkpoint, place.spec, tensor), place.spec.dtype.itemsize
        self.box = in_bytes(box, itemsize)
        self._pieces = partial(checkpoint.manifest.tensors[place.spec.name].pieces_in, box, itemsize)
        self._staging: torch.Tensor | None = None
        local = tensor.local.detach()
        # Its strides may not be expressible in those dimensions.
        if not local.is_contiguous() and tuple(local.shape) != box.shape:
            local = self._staging = torch.empty(box.shape, dtype=local.dtype, device="cpu")
        self._memory = _bytes_of(local, self.box.shape)
        self._array: Bytes | None = self._memory.numpy() if self._memory.device.type == "cpu" else None

    def blocks(self) -> list[PieceBlock]:
        """Return the blocks with bytes of this memory in file order: columns from several pieces alternate.

        A block is read into live memory directly if all its bytes are adjacent there.
        """
        blocks = list[PieceBlock]()
        for number, piece in self._pieces():
            box = in_bytes(piece.box, self.place.spec.dtype.itemsize)
            memory_box = relative(self.box, box)
            common = intersect(memory_box, whole(box.shape))
            packed = image(common, box.shape, 1)
            first, last = packed.start, packed.start + packed.extent
            memory = self._adjacent(relative(common, memory_box)) if packed.is_contiguous else None
            for block in blocks_in(self.place, number, piece, begin=first, end=last):
                is_direct = memory is not None and first <= block.lo and block.hi <= last
                into = memory[block.lo - first : block.hi - first] if memory is not None and is_direct else None
                blocks.append(replace(block, into=into, move=partial(self.move, box.shape, memory_box, block.lo)))
        return sorted(blocks, key=lambda block: next(block.packed.boxes(block.lo, block.hi))[1])

    def _adjacent(self, part: Box) -> Bytes | None:
        """Return the memory of a part of `box` if the host can write to it and it is contiguous, otherwise None."""
        if self._array is None:
            return None
        array = self._array[part.slices]
        return array.reshape(-1) if array.flags.c_contiguous else None

    def move(self, shape: tuple[int, ...], memory_box: Box, lo: int, data: Bytes) -> int:
        """Copy this memory's bytes from `data`, and return their count.

        Args:
            shape: The shape of a piece's box, in bytes.
            memory_box: This memory's box, relative to the piece's.
            lo: Where `data` starts in the packed piece.
        """
        at = moved = 0
        for box in extent(shape, lo, lo + data.size):
            part = intersect(box, memory_box)
            if part.numel:
                array = data[at : at + box.numel].reshape(box.shape)
                self._put(relative(part, memory_box).slices, array[relative(part, box).slices])
            at += box.numel
            moved += part.numel
        return moved

    def _put(self, index: tuple[slice, ...], data: Bytes) -> None:
        if self._array is not None:
            np.copyto(self._array[index], data)
        else:
            self._memory[index].copy_(torch.from_numpy(np.ascontiguousarray(data)))

    def finish(self) -> None:
        """Copy staged data to its destination, once all of it has arrived."""
        if self._staging is not None:
            overwrite(self.tensor.local, self._staging.reshape(self.tensor.local.shape))


def _written_box(checkpoint: Checkpoint, saved: TensorSpec, tensor: LiveTensor) -> Box:
    """Return a tensor's box in the dimensions it was written in, which may differ for an unsharded tensor."""
    if tensor.spec.view == saved.view:
        return tensor.box
    if tensor.box == whole(tensor.spec.view):
        return whole(saved.view)
    raise MismatchError(
        "A sharded tensor has different dimensions in the checkpoint",
        where=f"{checkpoint.path}, {saved.name}",
        expected=f"a view as {list(saved.view)}",
        found=f"{list(tensor.spec.view)}",
        fix="Load this tensor unsharded.",
    )


def _bytes_of(local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor's bytes, in its own memory, with this shape, whose last dimension is in bytes."""
    size = local.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=local.device)
    strides = (*(stride * size for stride in local.stride()), 1)
    memory.set_(local.untyped_storage(), local.storage_offset() * size, (*local.shape, size), strides)
    return memory.view(shape)
