"""Import torch, join the ranks that torchrun started, and print a line: the base of `scripts.bench.startup`.

Imports nothing else: it is the least start of any trainer on torch.
"""

import os

import torch.distributed as dist

READY = "ready"

if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        dist.barrier()
    print(READY, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
