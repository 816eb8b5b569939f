"""The modes of torch for tensors that the library makes and for writes to live ones, whatever the caller's are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Leave the caller's inference mode, whose tensors cannot be trained, and record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor to a live one, in the mode in which that was made."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(source)
