"""From a topology in integers to torch's device mesh, and to the ranks of one pipeline rank."""

from __future__ import annotations

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.checkpoint.tensors.live import Grid
from trainer.topology import Topology


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks over `Topology.AXES`. A collective call of all ranks."""
    return init_device_mesh(device_type, topology.sizes, mesh_dim_names=topology.AXES)


def stage_grid(topology: Topology, pp: int) -> Grid:
    """Return the ranks that hold the stages of pipeline rank `pp`, on the axes behind the first."""
    ranks = np.arange(topology.world_size).reshape(topology.sizes)
    return Grid(ranks[pp], topology.AXES[1:])
