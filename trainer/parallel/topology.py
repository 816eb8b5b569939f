"""How ranks are arranged along the axes, in integers. Other modules create meshes and process groups."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

# Accelerator types that `train.device` may name, as in torch; a ROCm device is a `cuda` device.
ACCELERATORS = ("cuda", "xpu")
# The most threads per rank, more than any host has cores; OpenMP would fail to start more.
MOST_THREADS = 4096


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's coordinates on the axes."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Axis sizes: pipeline, data and tensor parallel.

    Args:
        vpp: Virtual stages per pipeline rank.
        sp: Whether activations between tensor-parallel products are sharded along the sequence.
        replicate: Copies of the state that data-parallel ranks shard. Consecutive ranks share a copy.
    """

    # The only axis order; consecutive ranks differ in the last axis first.
    AXES: ClassVar[tuple[str, ...]] = ("pp", "dp", "tp")

    pp: int
    dp: int
    tp: int
    vpp: int = 1
    sp: bool = False
    replicate: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes in `AXES` order."""
        return tuple(getattr(self, axis) for axis in self.AXES)

    @property
    def shards(self) -> int:
        """Return the number of data-parallel ranks per copy of the state."""
        return self.dp // self.replicate

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Return the mesh and grid axes with their sizes. With several copies, `dp` counts a single copy's ranks."""
        copies = {"replicate": self.replicate} if self.replicate > 1 else {}
        return {"pp": self.pp, **copies, "dp": self.shards, "tp": self.tp}

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def coordinate(self, rank: int) -> Coordinate:
        """Return a rank's coordinates."""
        places = {}
        for axis, size in zip(reversed(self.AXES), reversed(self.sizes), strict=True):
            rank, places[axis] = divmod(rank, size)
        return Coordinate(**places)
