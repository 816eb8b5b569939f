"""Memory for parameters and optimizer state, laid out like the files: saving needs no copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reprise.format.layout import Layout
from reprise.tensors.dtypes import torch_dtype
from reprise.tensors.live import LiveTensor
from reprise.tensors.memory import map_like_file


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
    files: dict[str, list[tuple[int, str, torch.Tensor]]] = {}
    pairs = list(parameters)
    for prefix in prefixes:
        for live, local in pairs:
            name = prefix + live.spec.name
            offset = _offset_in_file(live, name, layout)
            if offset is not None and offset % alignment == 0 and local.device.type == "cpu" and local.is_contiguous():
                files.setdefault(layout.places[name].file, []).append((offset, name, local))
    zeros: dict[str, torch.Tensor] = {}
    for members in files.values():
        members.sort(key=lambda member: member[0])
        sizes = [(at, local.numel() * layout.places[name].spec.dtype.itemsize) for at, name, local in members]
        for (_, name, local), memory in zip(members, map_like_file(sizes), strict=True):
            dtype = torch_dtype(layout.places[name].spec.dtype)
            zeros[name] = torch.from_numpy(memory).view(dtype).view(local.shape)
    return zeros


def _offset_in_file(live: LiveTensor, name: str, layout: Layout) -> int | None:
    """Return a box's offset in its file, or None if its bytes are not contiguous there."""
    if live.is_copy or name not in layout.places:
        return None
    place = layout.places[name]
    packed = place.spec.image(live.box)
    if not (packed.is_contiguous and packed.total_bytes):
        return None
    return place.offset + next(packed.spans(0, 1))[0]
