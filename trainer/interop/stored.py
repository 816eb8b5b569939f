"""Tensors in other programs' files, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from reprise.errors import MismatchError
from trainer.interop.formats import listed
from trainer.interop.torch_file import FLOATS

Shape = tuple[int, ...]


class Sized(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> Shape:
        """Return the shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype."""


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
