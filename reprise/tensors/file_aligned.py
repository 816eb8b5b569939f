"""Memory for parameters and optimizer state, laid out like the files: saving needs no copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from reprise.format.dtype import StoredDtype
from reprise.format.layout import PAGE_BYTES, Layout
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.live import LiveTensor
from reprise.tensors.memory import Arena


def zeros_like_files(
    parameters: Iterable[tuple[LiveTensor, torch.Tensor]],
    prefixes: Iterable[str],
    layout: Layout,
    *,
    alignment: int = 1,
) -> dict[str, torch.Tensor]:
    """Return zeros for parameters and moments, at addresses congruent to their file offsets, in file order.

    Parameters on a device, or without contiguous rows in the file, are left out: saving copies them anyway.

    Args:
        parameters: Each parameter's live tensor, with the local memory around it.
        prefixes: Name prefixes for a parameter's tensors: empty for itself, `exp_avg.` for a moment.
        alignment: Tensors whose file offset is not a multiple of this many bytes are left out too.

    Returns:
        Tensors with the local memory's shape and the files' dtype, by stored name.
    """
    found = list[tuple[str, int, str, torch.Tensor, StoredDtype]]()
    for prefix, (live, local) in itertools.product(prefixes, parameters):
        name = prefix + live.spec.name
        place = layout.places.get(name)
        if place is None or live.is_copy or local.device.type != "cpu" or not local.is_contiguous():
            continue
        packed = place.spec.image(live.box)
        if packed.is_contiguous and packed.total_bytes:
            offset = place.offset + packed.start
            if offset % alignment == 0:
                found.append((place.file, offset, name, local, place.spec.dtype))
    found.sort(key=lambda each: each[:2])
    arena = Arena(sum(local.numel() * dtype.itemsize + PAGE_BYTES for *_, local, dtype in found), is_pinned=False)
    zeros: dict[str, torch.Tensor] = {}
    for _, offset, name, local, dtype in found:
        memory = arena.take(local.numel() * dtype.itemsize, offset=offset)
        assert memory is not None
        zeros[name] = torch.from_numpy(memory).view(torch_dtype(dtype)).view(local.shape)
    return zeros
