"""Imports and exports torch.distributed.checkpoint folders."""
