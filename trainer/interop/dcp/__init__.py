"""Import and export of torch.distributed.checkpoint folders."""
