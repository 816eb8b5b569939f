"""Torch's grad and inference modes for the library's own tensors and for writes to live ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Leave the caller's inference mode, whose tensors cannot be trained, and disable gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into a live one, in the mode in which the live one was made."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source)
