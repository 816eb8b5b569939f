"""How ranks are arranged along the axes, in integers. Meshes and process groups are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place on the axes."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The sizes of the axes: pipeline, data and tensor parallel; consecutive ranks differ in tp first.

    Args:
        vpp: virtual stages of each pipeline rank.
        sp: whether activations between tensor-parallel products are cut along the sequence.
    """

    pp: int
    dp: int
    tp: int
    vpp: int = 1
    sp: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinate(self, rank: int) -> Coordinate:
        """Return where `rank` stands."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(pp, dp, tp)
