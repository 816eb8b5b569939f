"""From a topology in integers to torch's device mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.topology import Topology

AXES = ("pp", "dp", "tp")


def build_mesh(topology: Topology, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks, with an axis for each of pp, dp and tp. A collective call of all ranks."""
    return init_device_mesh(device_type, (topology.pp, topology.dp, topology.tp), mesh_dim_names=AXES)
