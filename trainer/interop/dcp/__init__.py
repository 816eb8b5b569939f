"""Folders of torch.distributed.checkpoint, in and out."""
