"""Recursive halving on real ranks: the order of the sum, and the bytes that a rank sends for it."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import call_on_ranks
from trainer.launch import process_group
from trainer.parallel import halving
from trainer.parallel.halving import sum_all, sum_scatter

WIDTH = 1000  # elements that each rank gets


def values_of(rank: int, size: int) -> torch.Tensor:
    """Return float32 values [size] of very different magnitudes, so that another order is another sum."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator) * 10 ** torch.randint(0, 6, (size,), generator=generator)


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in pairs, then pairs of pairs."""
    while len(values) > 1:
        values = [values[number] + values[number + 1] for number in range(0, len(values), 2)]
    return values[0]


def sum_on_rank(arguments: list[str]) -> None:
    """Sum over all ranks in both ways, and write down whether the bits are those of the tree, and the bytes sent."""
    cluster = process_group.start("cpu", deterministic=False, threads=1)
    sent, exchange, ranks, rank = list[int](), halving._exchange, cluster.world_size, cluster.rank

    def counted(tensor: torch.Tensor, *rest: object) -> None:
        sent.append(tensor.nbytes)
        exchange(tensor, *rest)  # type: ignore[arg-type]

    halving._exchange = counted
    values = [values_of(number, ranks * WIDTH) for number in range(ranks)]
    own = sum_scatter(values[rank].clone(), dist.group.WORLD)
    odd = [value[:-3] for value in values]
    found = {
        "scatter": torch.equal(own, tree(values).view(ranks, WIDTH)[rank]),
        "all": torch.equal(sum_all(odd[rank].clone(), dist.group.WORLD), tree(odd)),
        "ring": torch.equal(own, reduce(torch.Tensor.add, values).view(ranks, WIDTH)[rank]),
        "sent": sent,
    }
    Path(f"{arguments[0]}.{rank}").write_text(json.dumps(found))
    process_group.shutdown(cluster)


@pytest.fixture(scope="module", params=[2, 4, 8])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return the words of every rank of 2, 4 and 8."""
    output = tmp_path_factory.mktemp("halving") / "found"
    ended = call_on_ranks(sum_on_rank, [str(output)], folder=output, ranks=request.param)
    assert ended.ok, ended.text
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(request.param)]


def test_the_sum_over_ranks_is_the_tree(found: list[dict[str, object]]) -> None:
    assert all(words["scatter"] and words["all"] for words in found)


def test_the_tree_is_no_sum_in_order_of_ranks(found: list[dict[str, object]]) -> None:
    assert all(words["ring"] is (len(found) == 2) for words in found)


def test_a_rank_sends_the_bytes_of_a_reduce_scatter(found: list[dict[str, object]]) -> None:
    ranks, rounds = len(found), len(found).bit_length() - 1
    for words in found:
        scatter, whole = words["sent"][:rounds], words["sent"][rounds:]  # type: ignore[index]
        assert sum(scatter) == 4 * WIDTH * (ranks - 1)
        assert sum(whole) == 4 * -(-(ranks * WIDTH - 3) // ranks) * (ranks - 1)
        assert scatter[0] == 4 * WIDTH * ranks // 2  # half of all, to the neighbor
