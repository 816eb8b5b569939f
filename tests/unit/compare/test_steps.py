"""The first difference of two records, from the values that both kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.compare.steps import StepDifference, StepPart, StepPlace, StepRecord, first_difference

PLACE = StepPlace(3, "gradient", -1, "weight", "gradient")
SIZE = (3 << 20) + 5


class LargestMade(TorchDispatchMode):
    """Takes note of the bytes of the largest memory that an operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.total_bytes = max(self.total_bytes, result.untyped_storage().nbytes())
        return result


def record(folder: Path, values: torch.Tensor) -> StepRecord:
    folder.mkdir()
    file, shape = folder / "rank0.bin", tuple(values.shape)
    file.write_bytes(values.view(torch.uint8).numpy().tobytes())
    part = StepPart(
        0, (0, 0, 0, 0), "float32", shape, (), (), digest=folder.name, norm=0.0, largest=0.0, file=file, at=0
    )
    return StepRecord({}, {PLACE: [part]})


def difference(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> StepDifference | None:
    return first_difference(record(tmp_path / "a", a), record(tmp_path / "b", b))


def test_large_tensors_are_compared_in_parts(tmp_path: Path) -> None:
    a, b = torch.arange(float(SIZE)), torch.arange(float(SIZE)) + 2
    with LargestMade() as made:
        found = difference(tmp_path, a, b)
    assert found is not None
    assert (found.differing, found.total, found.largest, found.at) == (SIZE, SIZE, 2.0, (0,))
    assert 0 < made.total_bytes < a.nbytes


@pytest.mark.parametrize("last", [7.5, float("nan")])
def test_differences_far_apart_are_counted_together(tmp_path: Path, last: float) -> None:
    a = torch.zeros(5, SIZE // 5 + 1)
    b = a.clone()
    b[2, 100], b[4, 7], b[4, -1] = -0.0, 1.5, last
    found = difference(tmp_path, a, b)
    assert found is not None
    assert (found.differing, found.total, found.at) == (3, a.numel(), (2, 100))
    assert found.largest == (7.5 if last == last else float("inf"))
    assert found.detail == f"float32 {list(a.shape)}, 0 and -0 at [2, 100]"


def test_equal_bits_are_no_difference(tmp_path: Path) -> None:
    values = torch.full((3, 4), float("nan"))
    assert difference(tmp_path, values, values.clone()) is None
