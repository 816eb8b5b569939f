"""The grid by which objects are fetched, once for all ranks on a host.

A request takes a store tens of milliseconds, whatever its size. So an object is fetched by cells of a grid: reads of
neighboring tensors share a request, and a cell read by several ranks, or twice by a rank, is fetched once while it is
kept.
"""

from __future__ import annotations

Version = tuple[int, str | None, float]  # an object's size, ETag and time: a store may have no ETag

# With moto's server, 8 MiB requests took two thirds of the time of 4 MiB ones.
CELL_BYTES = 8 << 20
# The first cell: a file's header, and its first small tensors.
FIRST_CELL_BYTES = 64 << 10
# How much a process that reads alone keeps: it rarely reads a cell again.
KEPT_BYTES = 512 << 20


def cell_at(at: int, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the cell containing the byte `at`, in an object with `size` bytes."""
    start = at - (at - FIRST_CELL_BYTES) % CELL_BYTES if at >= FIRST_CELL_BYTES else 0
    return start, min(size, start + CELL_BYTES if start else FIRST_CELL_BYTES)
