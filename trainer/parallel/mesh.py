"""Builds torch's device mesh and a pipeline rank's grid from a topology."""

from __future__ import annotations

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reprise.tensors import Grid
from trainer.parallel.topology import Topology


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh | None:
    """Return the mesh over all ranks, with `Topology.mesh_axes`. None for a single rank. A collective call."""
    if topology.world_size == 1:
        return None
    axes = topology.mesh_axes
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def stage_grid(topology: Topology, pp: int) -> Grid:
    """Return the grid of ranks with pipeline rank `pp`'s stages, on the axes after pp."""
    axes = topology.mesh_axes
    ranks = np.arange(topology.world_size).reshape(tuple(axes.values()))
    return Grid(ranks[pp], tuple(axes)[1:])
