"""Builds torch's device mesh and the grid of a pipeline rank from a topology."""

from __future__ import annotations

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reprise.tensors import Grid
from trainer.parallel.topology import Topology


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks with `Topology.mesh_axes`. A collective call of all ranks."""
    axes = topology.mesh_axes
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def stage_grid(topology: Topology, pp: int) -> Grid:
    """Return the ranks with the stages of pipeline rank `pp`, on the axes after pp."""
    axes = topology.mesh_axes
    ranks = np.arange(topology.world_size).reshape(tuple(axes.values()))
    return Grid(ranks[pp], tuple(axes)[1:])
