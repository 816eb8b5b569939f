"""The first difference of two records, from the values that both kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from trainer.steps.records import StepDifference, StepPart, StepPlace, StepRecord, first_difference

PLACE = StepPlace(3, "gradient", -1, "weight", "gradient")


def record(folder: Path, values: torch.Tensor) -> StepRecord:
    folder.mkdir()
    file, shape = folder / "rank0.bin", tuple(values.shape)
    dtype = str(values.dtype).removeprefix("torch.")
    file.write_bytes(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    digest = xxhash.xxh3_64_hexdigest(file.read_bytes())
    part = StepPart(0, (0, 0, 0, 0), file, dtype, shape, (), (), digest, at=0)
    return StepRecord({}, {PLACE: [part]})


def difference(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> StepDifference | None:
    return first_difference(record(tmp_path / "a", a), record(tmp_path / "b", b))


@pytest.mark.parametrize("last", [7.5, float("nan")])
def test_differences_are_counted_and_the_first_is_named(tmp_path: Path, last: float) -> None:
    a = torch.zeros(5, 200)
    b = a.clone()
    b[2, 100], b[4, 7], b[4, -1] = -0.0, 1.5, last
    found = difference(tmp_path, a, b)
    assert found is not None
    largest = 7.5 if last == last else float("inf")
    assert found.largest == largest
    count = f"3 of {a.numel()} values differ, by at most {largest}: "
    assert found.detail == f"{count}float32 {list(a.shape)}, 0 and -0 at [2, 100]"


@pytest.mark.parametrize(
    ("a", "b", "at", "detail"),
    [
        (torch.tensor(1.0), torch.tensor(-2.0), (), "float32 [], 1 and -2 at []"),
        (
            torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
            torch.tensor([[1.0, 2.015625]], dtype=torch.bfloat16),
            (0, 1),
            "bfloat16 [1, 2], 2 and 2.015625 at [0, 1]",
        ),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1,), "bool [2], 0 and 1 at [1]"),
    ],
    ids=["of no dimension", "bfloat16", "bool"],
)
def test_a_single_value_differs(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, at: tuple[int, ...], detail: str
) -> None:
    found = difference(tmp_path, a, b)
    assert found is not None
    assert found.largest == abs(float(a[at]) - float(b[at]))
    assert found.detail == f"1 of {a.numel()} values differ, by at most {found.largest:.3g}: {detail}"


@pytest.mark.parametrize("values", [torch.full((3, 4), float("nan")), torch.empty(0, dtype=torch.bool)])
def test_equal_bits_are_no_difference(tmp_path: Path, values: torch.Tensor) -> None:
    assert difference(tmp_path, values, values.clone()) is None


def test_the_same_bytes_in_another_form_are_a_difference(tmp_path: Path) -> None:
    found = difference(tmp_path, torch.zeros(2), torch.zeros(1, 2))
    assert found is not None
    assert found.detail == "float32 [2] and float32 [1, 2]"


def test_replicas_of_one_side_that_differ_are_a_difference(tmp_path: Path) -> None:
    parts = record(tmp_path / "a", torch.zeros(2)).parts[PLACE]
    equal, other = (replace(parts[0], rank=1, offset=(0,), tensor_shape=(2,), digest=digest) for digest in "12")
    sides = (StepRecord({}, {PLACE: [replica, equal]}) for replica in (other, equal))
    found = first_difference(*sides)
    assert found is not None
    assert found.detail == "ranks hold the same part with different values"
