"""Adapts stored tensors to a model with another dtype or other table sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from models import families
from models.config import ModelConfig
from reprise.format import Box, TensorKind, TensorSpec
from reprise.tensors import LiveTensor, torch_dtype
from trainer.run.random import fill_initial_values

# Dtypes without a log line.
_UNCAST = {"float32"}


class Fitting:
    """A rank's live tensors, matched to their stored form. Tables with new rows have a fresh run's initial values.

    Args:
        live: The tensors to fill. Tensors that are not loaded must have their values before `finish`.
        stored: The form of every tensor to load, by name. Floating-point dtypes and tables' row counts may differ.
        model: The live tensors' model.
        seed: The seed for initial values.
    """

    def __init__(
        self, live: Sequence[LiveTensor], stored: Mapping[str, TensorSpec], model: ModelConfig, seed: int
    ) -> None:
        self._stored, self.count = stored, len(live)
        tensors = [tensor for tensor in live if tensor.spec.name in stored]
        self._pairs = [(tensor, _request(tensor, stored[tensor.spec.name])) for tensor in tensors]
        self._tables = {
            name: stored[name].shape[0]
            for name, tensor in families.stored_tensors(model).items()
            if name in stored and stored[name].shape != tensor.shape
        }
        tables = [tensor for tensor in tensors if tensor.spec.name in self._tables]
        if tables:
            fill_initial_values(tables, families.initial_values(model), seed)

    @property
    def requests(self) -> list[LiveTensor]:
        """Return the tensors to fill from the files, in stored form."""
        return [request for _, request in self._pairs]

    def notes(self, where: object) -> list[str]:
        """Return log lines about tensors that are cast, or loaded in part."""
        lines = [f"{name}: {rows} rows of {where} are kept by number" for name, rows in self._tables.items()]
        weights = [spec for spec in self._stored.values() if spec.kind is not TensorKind.OPTIMIZER]
        if cast := sorted({str(spec.dtype) for spec in weights} - _UNCAST):
            lines.append(f"cast to float32 from {', '.join(cast)}: {where}")
        return lines

    def finish(self) -> None:
        """Move the filled values into the live tensors."""
        with torch.no_grad():
            for tensor, request in self._pairs:
                if request is not tensor:
                    tensor.local.narrow(0, 0, request.box.shape[0]).copy_(request.local)


def _request(tensor: LiveTensor, stored: TensorSpec) -> LiveTensor:
    """Return the tensor itself, or a tensor in stored form with its own memory if it differs."""
    spec, box = tensor.spec, tensor.box
    if (stored.dtype, stored.shape) == (spec.dtype, spec.shape):
        return tensor
    count = max(0, min(box.end[0], stored.view[0]) - box.offset[0])
    box = Box(box.offset if count else (0, *box.offset[1:]), (count, *box.shape[1:]))
    local = torch.empty(box.shape, dtype=torch_dtype(stored.dtype), device=tensor.local.device)
    return replace(tensor, spec=stored, box=box, local=local)
