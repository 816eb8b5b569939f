"""Casts a rank's tensors for saves in another dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from reprise.format.layout import build_layout
from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Contents
from reprise.tensors.modes import own_modes


class Cast:
    """A rank's tensors in another dtype, in host memory reused between saves.

    The memory is laid out as in the files where rows are contiguous there.
    """

    @own_modes()
    def __init__(self, contents: Contents, dtype: torch.dtype, *, file_bytes: int) -> None:
        specs = {spec.name: replace(spec, dtype=stored_dtype(dtype, where=spec.name)) for spec in contents.specs}
        self.source, self._specs = contents.live, tuple(specs.values())
        self._sources = [tensor for tensor in contents.live if not tensor.is_copy]
        empty = [torch.empty(tensor.box.shape, dtype=dtype, device="cpu") for tensor in self._sources]
        layout = build_layout(self._specs, file_bytes=file_bytes)
        aligned = zeros_like_files(zip(self._sources, empty, strict=True), ("",), layout)
        self._live = tuple(
            replace(tensor, spec=specs[tensor.spec.name], local=aligned.get(tensor.spec.name, memory))
            for tensor, memory in zip(self._sources, empty, strict=True)
        )

    def filled(self, contents: Contents) -> Contents:
        """Cast the tensors' current values, and return these contents with the cast tensors."""
        with torch.no_grad():
            for source, target in zip(self._sources, self._live, strict=True):
                target.local.copy_(source.local)
        return replace(contents, specs=self._specs, live=self._live, optimizers=(), is_own=True)
