"""Builds torch's device mesh and the grid of a pipeline rank from a topology."""

from __future__ import annotations

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reprise.live_tensors import Grid
from trainer.parallel.topology import Topology


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks with the axes `Topology.AXES`. A collective call of all ranks."""
    return init_device_mesh(device_type, topology.sizes, mesh_dim_names=topology.AXES)


def stage_grid(topology: Topology, pp: int) -> Grid:
    """Return the ranks with the stages of pipeline rank `pp`, on the axes after pp."""
    ranks = np.arange(topology.world_size).reshape(topology.sizes)
    return Grid(ranks[pp], topology.AXES[1:])
