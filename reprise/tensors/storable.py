"""Checks for tensors to be saved and filled: plain numbers, each element with its own bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprise.errors import CheckpointError


def check_byteorder(byteorder: str) -> None:
    """Refuse a host whose `sys.byteorder` differs from the files': memory is written unconverted.

    Raises:
        CheckpointError: on a big-endian host.
    """
    if byteorder != "little":
        raise CheckpointError(
            "Checkpoints are little-endian and are never converted",
            where="this host",
            expected="a little-endian host",
            found=f"a {byteorder}-endian one",
        )


def check_memory(name: str, local: torch.Tensor) -> None:
    """Refuse a tensor other than strided memory with separate bytes for each element.

    Raises:
        CheckpointError: naming a sparse, nested or quantized tensor, or a tensor whose elements share memory.
    """
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        kind = "a nested tensor" if local.is_nested else local.dtype if local.is_quantized else local.layout
        fix = "Keep it out of the state, or store its parts as tensors of their own."
        raise CheckpointError(
            "A tensor is not plain memory", where=name, expected="a strided tensor of numbers", found=kind, fix=fix
        )
    if _may_overlap_itself(local):
        raise CheckpointError(
            "Elements of a tensor share memory",
            where=name,
            found=f"strides {local.stride()} for a shape of {tuple(local.shape)}",
            fix="Make it contiguous (an expanded tensor is stored as the one it was expanded from).",
        )


def check_disjoint(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors with common memory: a load fills both, and the later wins.

    Args:
        tensors: tensors approved by `check_memory`, each once.

    Raises:
        CheckpointError: naming the first two.
    """
    spans = [
        (str(local.device), local.data_ptr(), local.data_ptr() + _extent_bytes(local), name, local)
        for name, local in tensors
        if local.numel() and local.device.type != "meta"
    ]
    open_spans: list[tuple[str, int, int, str, torch.Tensor]] = []
    for span in sorted(spans, key=lambda span: span[:4]):
        open_spans = [neighbor for neighbor in open_spans if neighbor[0] == span[0] and neighbor[2] > span[1]]
        for neighbor in open_spans:
            if _share_memory(neighbor[4], span[4]):
                raise CheckpointError(
                    "Two tensors share memory without being the same tensor",
                    where=" and ".join(sorted((neighbor[3], span[3]))),
                    fix="Tie them by assigning one and the same parameter, or clone one of them.",
                )
        open_spans.append(span)


def _may_overlap_itself(local: torch.Tensor) -> bool:
    """Return False only if every element certainly has its own bytes: strides do not reach into each other."""
    reach = 0
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and local.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _extent_bytes(local: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return (last + 1) * local.itemsize


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both contain a common byte: interleaved columns of a matrix do not."""
    start = min(a.data_ptr(), b.data_ptr())
    end = max(a.data_ptr() + _extent_bytes(a), b.data_ptr() + _extent_bytes(b))
    is_taken = torch.zeros(end - start, dtype=torch.bool)
    _bytes_of(a, is_taken, start).fill_(True)
    return bool(_bytes_of(b, is_taken, start).any())


def _bytes_of(local: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of `memory`, a byte map from address `start` on, with the layout of `local`."""
    strides = [stride * local.itemsize for stride in local.stride()]
    return memory.as_strided((*local.shape, local.itemsize), (*strides, 1), local.data_ptr() - start)
