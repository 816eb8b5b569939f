"""Casts a rank's tensors for saves in another dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from reprise.tensors.dtypes import stored_dtype
from reprise.tensors.live import Contents
from reprise.tensors.modes import own_modes


class Cast:
    """A rank's tensors in another dtype, in host memory reused between saves."""

    @own_modes()
    def __init__(self, contents: Contents, dtype: torch.dtype) -> None:
        specs = {spec.name: replace(spec, dtype=stored_dtype(dtype, where=spec.name)) for spec in contents.specs}
        self.source, self._specs = contents.live, tuple(specs.values())
        self._sources = [tensor for tensor in contents.live if not tensor.is_copy]
        self._live = tuple(
            replace(
                tensor,
                spec=specs[tensor.spec.name],
                local=torch.empty(tensor.box.shape, dtype=dtype, device="cpu"),
            )
            for tensor in self._sources
        )

    def filled(self, contents: Contents) -> Contents:
        """Cast the tensors' current values, and return these contents with the cast tensors."""
        with torch.no_grad():
            for source, target in zip(self._sources, self._live, strict=True):
                target.local.copy_(source.local)
        return replace(contents, specs=self._specs, live=self._live, optimizers=(), is_own=True)
