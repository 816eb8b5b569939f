"""Puts this folder on the path, so that tests share `fakes.py`, and keeps torch to one thread."""

import torch

torch.set_num_threads(1)
