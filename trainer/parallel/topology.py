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
    """

    # The one order of the axes, of meshes and grids too; consecutive ranks differ in the last first.
    AXES: ClassVar[tuple[str, ...]] = ("pp", "dp", "tp")

    pp: int
    dp: int
    tp: int
    vpp: int = 1
    sp: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of `AXES`."""
        return tuple(getattr(self, axis) for axis in self.AXES)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    def coordinate(self, rank: int) -> Coordinate:
        """Return where `rank` stands."""
        places = {}
        for axis, size in zip(reversed(self.AXES), reversed(self.sizes), strict=True):
            rank, places[axis] = divmod(rank, size)
        return Coordinate(**places)
