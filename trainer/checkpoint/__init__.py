"""A checkpoint library: whole logical tensors, written in place by all ranks, committed by one rename.

    from trainer.checkpoint import save, load

It needs nothing of the trainer around it and works on any torch model and optimizer.
"""

from trainer.checkpoint.api import load, save

__all__ = ["load", "save"]
