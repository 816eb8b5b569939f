"""Converts stored dtypes to torch's, and back."""

from __future__ import annotations

import torch

from reprise.errors import CheckpointError
from reprise.format.dtype import StoredDtype

STORED_DTYPES: dict[torch.dtype, StoredDtype] = {getattr(torch, dtype.label): dtype for dtype in StoredDtype}


def torch_dtype(dtype: StoredDtype) -> torch.dtype:
    """Return torch's dtype for a stored one."""
    found: torch.dtype = getattr(torch, dtype.label)
    return found


def stored_dtype(dtype: torch.dtype, *, where: object) -> StoredDtype:
    """Return the stored dtype for torch's `dtype`.

    Args:
        where: The tensor name, for the error.

    Raises:
        CheckpointError: Safetensors lacks the dtype.
    """
    if dtype not in STORED_DTYPES:
        raise CheckpointError(
            "A tensor has a dtype that safetensors cannot hold",
            where=where,
            expected="one of " + ", ".join(sorted(StoredDtype.__members__)),
            found=dtype,
            fix="Store it as a view of a supported dtype, or keep it out of the state.",
        )
    return STORED_DTYPES[dtype]
