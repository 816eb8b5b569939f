"""Writes unsharded tensors into a layout's files, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from reprise.errors import CheckpointError
from reprise.format import BLOCK_BYTES, FileLayout, Layout, Place, WrittenPiece, digest_of, whole
from reprise.storage import Files
from reprise.tensors import torch_dtype

Read = Callable[[str], torch.Tensor]


def write_tensor_files(folder: Path, files: Files, layout: Layout, read: Read) -> list[WrittenPiece]:
    """Write and sync every file in `layout` to an existing folder. Return each tensor as a piece with digests.

    At most a single tensor is in memory, cast to the layout's dtype block by block. On a terminal, a progress bar
    on standard error counts the bytes.

    Raises:
        CheckpointError: A tensor's shape differs from the layout's, or a value is beyond the dtype.
        OSError: The file system fails.
    """
    pieces = []
    total = sum(place.spec.total_bytes for place in layout.places.values())
    with tqdm(total=total, desc=folder.name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for file in layout.files:
            path = folder / file.name
            files.make_folder(path.parent)
            pieces += list(_write_file(path, files, file, read, bar.update))
    return pieces


def _write_file(
    path: Path, files: Files, file: FileLayout, read: Read, progress: Callable[[int], object]
) -> Iterator[WrittenPiece]:
    descriptor = files.open_for_writing(path)
    try:
        files.reserve(descriptor, file.total_bytes)
        files.write(descriptor, memoryview(file.header), offset=0)
        for place in file.places:
            # A separate function: a block outliving the loop would keep its tensor in memory during the next read.
            digests = _write_tensor(files, descriptor, place, read, progress)
            yield WrittenPiece(place.spec.name, whole(place.spec.view), 0, place.spec.total_bytes, digests)
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def _write_tensor(files: Files, descriptor: int, place: Place, read: Read, progress: Callable[[int], object]) -> bytes:
    """Write a tensor at its offset in an open file. Return its concatenated block digests."""
    spec, tensor, offset, digests = place.spec, read(place.spec.name), place.offset, list[bytes]()
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            "A tensor's shape differs from the model's",
            where=spec.name,
            expected=list(spec.shape),
            found=list(tensor.shape),
        )
    for block in blocks_of(tensor, torch_dtype(spec.dtype), where=spec.name):
        files.write(descriptor, block, offset=offset)
        digests.append(bytes.fromhex(digest_of(block)))
        offset += block.nbytes
        progress(block.nbytes)
    return b"".join(digests)


def blocks_of(tensor: torch.Tensor, dtype: torch.dtype, *, where: str) -> Iterator[memoryview]:
    """Yield a tensor's bytes in C order, cast to `dtype`, in blocks of `BLOCK_BYTES`. The last may be shorter.

    Raises:
        CheckpointError: A tensor with another dtype is not floating point, or a finite value is beyond `dtype`.
    """
    if not tensor.is_floating_point() and tensor.dtype is not dtype:
        raise CheckpointError("The tensor is not a floating-point tensor", where=where, found=tensor.dtype)
    flat = tensor.detach().reshape(-1)
    count = BLOCK_BYTES // dtype.itemsize
    for lo in range(0, flat.numel(), count):
        values = flat[lo : lo + count]
        cast = values.to(dtype).contiguous()
        if dtype.itemsize < values.dtype.itemsize and bool((cast.isinf() & values.isfinite()).any()):
            raise CheckpointError(
                "A value is out of the dtype's range",
                where=where,
                expected=f"at most {torch.finfo(dtype).max}, the largest of {dtype}",
                found=float(values.abs().max()),
                fix="Use bfloat16 or float32.",
            )
        yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]
