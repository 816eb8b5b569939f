"""Imports the parts of torch for the parallel axes of a run, before the ranks join.

Each takes 0.3 to 0.9 s, so no other module of this package imports them at its top, and a run has only its own.
"""

from __future__ import annotations

from importlib import import_module

from trainer.parallel.topology import Topology


def import_axes(topology: Topology, *, zero_stage: int) -> None:
    """Import them; a module left out is imported by its first use."""
    names = []
    if topology.dp > 1 and zero_stage > 0:
        names += ["torch.distributed.fsdp", "torch._dynamo"]  # of which a DTensor imports the second when it is made
    if topology.tp > 1:
        names += ["trainer.parallel.tensor", "torch._dynamo"]
    if topology.pp > 1:
        names.append("torch.distributed.pipelining")
    for name in names:
        import_module(name)
