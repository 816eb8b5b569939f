"""Keeps torch to one thread in every test that runs in this process."""

import torch

torch.set_num_threads(1)
