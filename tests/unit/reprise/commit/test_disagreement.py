"""What ranks do not agree on is found in their reports, and named."""

from __future__ import annotations

import pytest
import torch

from reprise.commit import disagreement
from reprise.commit.inventory import Inventory
from reprise.commit.report import Offer
from reprise.errors import CheckpointError, ReplicaError
from reprise.format.box import Box, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.tensors.live import LiveTensor
from tests.messages import refused

BOTH = (0, 1)


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape)


def inventory(names: dict[str, bytes], *, box: Box | None = None) -> Inventory:
    """Return the inventory of a rank that shares tensors of 4 rows with another, by name: the digests of its blocks."""
    specs = [spec(name, 4, 2) for name in names]
    live = [LiveTensor(found, box or whole((4, 2)), torch.zeros(4, 2), BOTH) for found in specs]
    return Inventory(live, {BOTH: names}, build_layout(specs))


def offered(*inventories: Inventory) -> dict[int, Offer]:
    offers = [Offer(1, found.identity, found.groups()) for found in inventories]
    return {rank: Offer.from_bytes(offer.to_bytes()) for rank, offer in enumerate(offers)}


def explained(*inventories: Inventory) -> str:
    found = disagreement.find(offered(*inventories))
    assert found is not None
    error = disagreement.explain(found, [inventories[rank].to_bytes() for rank in found.witnesses])
    assert isinstance(error, ReplicaError) == found.is_of_content
    return str(error)


def test_ranks_that_agree_have_nothing_to_explain() -> None:
    same = {"a": b"12345678", "b": b"abcdefgh"}
    assert disagreement.find(offered(inventory(same), inventory(same), inventory(same))) is None


A, NAMES = {"a": b"12345678"}, [f"t{number}" for number in range(5)]
A_AND_B = {**A, "b": b"abcdefgh"}


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (A_AND_B, {**A, "b": b"abcdefgX"}, "found b; ranks 0, 3 against ranks 1, 2."),
        (A_AND_B, dict(reversed(A_AND_B.items())), "the order of the tensors"),
        (
            dict.fromkeys(NAMES, b""),
            dict.fromkeys([*NAMES[1:], "u"], b""),
            "found t0 only on rank 0; u only on rank 1.",
        ),
        (dict.fromkeys(NAMES, b""), {"u": b""}, "6 differences, the first: t0 only on rank 0; t1 only on rank 0; t2"),
    ],
)
def test_a_difference_is_named_by_tensor_and_rank(first: dict[str, bytes], second: dict[str, bytes], text: str) -> None:
    a, b = inventory(first), inventory(second)
    assert text in explained(a, b, b, a)


def test_another_box_of_a_shared_tensor_is_a_difference() -> None:
    text = explained(inventory(A), inventory(A, box=Box((0, 0), (2, 2))))
    assert "a on rank 0 and (the box at [0, 0] of [2, 2]) on rank 1" in text.replace("  ", " ")


def test_other_iterations_are_refused_with_their_ranks() -> None:
    with refused(CheckpointError, "iteration 4 on ranks 0, 1", "iteration 5 on rank 2"):
        disagreement.refuse_other_iterations({0: 4, 1: 4, 2: 5})
    disagreement.refuse_other_iterations({0: 4, 1: 4})
