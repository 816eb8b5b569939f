"""How ranks are arranged along the axes, in integers. Meshes and process groups are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

# The types of accelerators that `train.device` may name, as torch does; a device of ROCm is a `cuda` one.
ACCELERATORS = ("cuda", "xpu")
# More threads of one rank than any host has cores; OpenMP would fail to start them.
MOST_THREADS = 4096


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place on the axes."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The sizes of the axes: pipeline, data and tensor parallel.

    Args:
        vpp: virtual stages of each pipeline rank.
        sp: whether activations between tensor-parallel products are cut along the sequence.
        replicate: copies of the state that data-parallel ranks shard; consecutive ranks share a copy.
    """

    # The one order of the axes; consecutive ranks differ in the last first.
    AXES: ClassVar[tuple[str, ...]] = ("pp", "dp", "tp")

    pp: int
    dp: int
    tp: int
    vpp: int = 1
    sp: bool = False
    replicate: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of `AXES`."""
        return tuple(getattr(self, axis) for axis in self.AXES)

    @property
    def shards(self) -> int:
        """Return the number of data-parallel ranks that share a copy of the state."""
        return self.dp // self.replicate

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Return the axes of meshes and grids with their sizes; where there are copies, `dp` has the ranks of one."""
        copies = {"replicate": self.replicate} if self.replicate > 1 else {}
        return {"pp": self.pp, **copies, "dp": self.shards, "tp": self.tp}

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def coordinate(self, rank: int) -> Coordinate:
        """Return where `rank` stands."""
        places = {}
        for axis, size in zip(reversed(self.AXES), reversed(self.sizes), strict=True):
            rank, places[axis] = divmod(rank, size)
        return Coordinate(**places)
