"""Converts stored dtypes to torch's, and back."""

from __future__ import annotations

import torch

from reprise.errors import CheckpointError
from reprise.format.dtype import StoredDtype

_TORCH_DTYPES: dict[StoredDtype, torch.dtype] = {dtype: getattr(torch, dtype.label) for dtype in StoredDtype}
_STORED_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items()}


def torch_dtype(dtype: StoredDtype) -> torch.dtype:
    """Return torch's dtype for a stored one."""
    return _TORCH_DTYPES[dtype]


def stored_dtype(dtype: torch.dtype, *, where: object) -> StoredDtype:
    """Return the stored dtype for torch's `dtype`.

    Args:
        where: The tensor name, for the error.

    Raises:
        CheckpointError: Safetensors lacks the dtype.
    """
    if dtype not in _STORED_DTYPES:
        raise CheckpointError(
            "A tensor has a dtype that safetensors cannot hold",
            where=where,
            expected="one of " + ", ".join(sorted(StoredDtype.__members__)),
            found=dtype,
            fix="Store it as a view of a supported dtype, or keep it out of the state.",
        )
    return _STORED_DTYPES[dtype]


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a dtype."""
    return dtype in _STORED_DTYPES
