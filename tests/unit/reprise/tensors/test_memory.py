"""Copies of tensors from host memory."""

from __future__ import annotations

import numpy as np
import numpy.ctypeslib
import pytest
import torch

from reprise.tensors.memory import HostMemory


def test_a_copy_needs_no_attribute_that_numpy_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread imports `numpy.ctypeslib` and has not yet added it to numpy, the attribute recurses."""
    monkeypatch.delattr(numpy, "ctypeslib")
    with pytest.raises(RecursionError):
        _ = np.ctypeslib
    source = torch.arange(100, dtype=torch.uint8)
    target = np.zeros(40, dtype=np.uint8)
    HostMemory(source, is_private=True).copy_to(target, 30)
    assert target.tolist() == list(range(30, 70))
