"""Torch's dtypes of stored tensors."""

from __future__ import annotations

import pytest
import torch

from reprise.errors import CheckpointError
from reprise.format.dtype import StoredDtype
from reprise.tensors.dtypes import stored_dtype, torch_dtype


@pytest.mark.parametrize("dtype", StoredDtype, ids=str)
def test_a_stored_dtype_is_torch_s_of_its_label_and_size(dtype: StoredDtype) -> None:
    found = torch_dtype(dtype)
    assert (str(found), found.itemsize) == (f"torch.{dtype}", dtype.itemsize)
    assert stored_dtype(found, where="w") is dtype


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.qint8])
def test_a_dtype_that_safetensors_lacks_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError) as caught:
        stored_dtype(dtype, where="rotary.table")
    assert "rotary.table" in str(caught.value)
    assert str(dtype) in str(caught.value)
