"""Tensors in other programs' files, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig
from reprise.errors import MismatchError
from trainer.interop.dcp.folder import DcpTensor
from trainer.interop.finite import require_finite
from trainer.interop.formats import listed
from trainer.interop.torch_file import FLOATS

Shape = tuple[int, ...]
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file, or a rank's part of one.

    Args:
        read: Returns it, as a view of a mapped file where possible, to keep nothing in memory.
    """

    shape: Shape
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FileTensor:
        """Return a tensor, usually in a mapped file, as one to read."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def head(self, rows: int) -> FileTensor:
        """Return the tensor's first rows."""
        return FileTensor((rows, *self.shape[1:]), self.dtype, lambda: self.read()[:rows])


Sized = torch.Tensor | FileTensor | DcpTensor


@dataclass(frozen=True, slots=True)
class ForeignWeights:
    """Another program's weights: a transformers folder, or an llm.c file.

    Args:
        path: The folder or file.
        tensors: Its tensors, by stored name.
        files: Each tensor's file.
        notes: Log lines, on settings missing from `model` and on tensors left out.
    """

    path: Path
    model: ModelConfig
    tensors: Mapping[str, FileTensor]
    files: Mapping[str, Path]
    notes: Sequence[str] = ()


def require_fit(
    stored: Mapping[str, Sized],
    expected: Mapping[str, Shape],
    is_allowed: Callable[[str], bool] = lambda _: False,
    *,
    where: object,
    fix: str | None = None,
    differences: Iterable[str] = (),
) -> None:
    """Refuse missing and unexpected tensors, and tensors with another shape or no floating-point numbers.

    Args:
        is_allowed: Whether the model may lack a stored tensor, by name.
        differences: Other differences from the model.

    Raises:
        MismatchError: There are differences. The error lists them.
    """
    problems = [f"missing: {name}" for name in expected if name not in stored]
    for name, tensor in stored.items():
        if name not in expected:
            problems += [] if is_allowed(name) else [f"not of the model: {name}"]
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name}: shape {list(tensor.shape)}, expected {list(expected[name])}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"{name}: {tensor.dtype}")
    if problems := [*problems, *differences]:
        content = listed(problems, "difference")
        raise MismatchError("The files hold a different model", where=where, found=content, fix=fix)


def are_equal(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether tensors are equal once they are cast, which is done in small parts."""
    parts = zip(*(torch.split(tensor.reshape(tensor.shape or (1,)), _ROWS) for tensor in (first, second)), strict=False)
    return first.shape == second.shape and all(torch.equal(one.to(dtype), other.to(dtype)) for one, other in parts)


def require_tied(stored: torch.Tensor, alias: torch.Tensor, *, where: object) -> None:
    """Refuse an output layer that differs from its tied embedding.

    Raises:
        MismatchError: They differ.
        CheckpointError: They hold NaN or infinity.
    """
    if not are_equal(stored, alias, torch.float32):
        require_finite(stored, where=where)  # NaN is never equal to itself
        raise MismatchError(
            "The embedding and the output layer differ, so they are not tied",
            where=where,
            fix="Set model.tie_word_embeddings=false, and tie_word_embeddings to false in a config.json beside.",
        )
