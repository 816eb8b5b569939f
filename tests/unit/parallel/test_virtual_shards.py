"""Virtual shards compute the model, in the products, blocks and sums that as many tensor-parallel ranks would have."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch
import torch.distributed as dist

from models.config import Stage
from models.layers import token_loss
from tests.harness import TINY, compose
from tests.unit.model_samples import fill, random_values
from trainer.config.schema import Config
from trainer.parallel import halving, virtual_shards
from trainer.parallel.shard_products import ShardWeight, parts_of, product
from trainer.parallel.shard_sums import Shards, is_operand, join_tokens, operand, tree_sum
from trainer.parallel.topology import Topology
from trainer.run.parallelize import allocate, build_stage

FAMILIES = {
    "gpt2": ["model=gpt2_tiny", "model.n_embd=24"],
    "llama3": ["model=llama3_tiny", "model.n_embd=24", "model.n_kv_head=4"],
    "qwen3": ["model=qwen3_tiny", "model.n_embd=24", "model.n_kv_head=4", "model.head_dim=6"],
}
SHARDS = "parallel.invariant_tensor_ranks=4"


def config_of(family: str, *overrides: str) -> Config:
    sizes = ["model.n_head=4", "model.pad_vocab_multiple=4", "parallel.invariant_ranks=1"]
    return compose([*TINY, *FAMILIES[family], *sizes, *overrides])


def gradients_of(config: Config, *, key: int | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a batch and the gradients by name."""
    stage, topology = Stage.whole(config.model.n_layer), Topology(1, 1, 1)
    model = build_stage(config, stage=stage, topology=topology, mesh=None)
    allocate(model, torch.device("cpu"))
    torch.manual_seed(7)
    fill(model, random_values(config.model))
    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(3))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3] = -100
    logits = model(inputs, dropout_key=key)
    count = config.parallel.invariant_tensor_ranks
    loss = virtual_shards.cross_entropy(logits, targets, shards=Shards(count)) if count else token_loss(logits, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_compute_the_model(family: str) -> None:
    loss, gradients = gradients_of(config_of(family))
    shard_loss, shard_gradients = gradients_of(config_of(family, SHARDS))
    torch.testing.assert_close(shard_loss, loss, rtol=1e-6, atol=0)
    assert shard_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(shard_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_each_number_of_shards_has_masks_of_its_own() -> None:
    losses = [
        gradients_of(config_of("gpt2", "model.dropout=0.1", f"parallel.invariant_tensor_ranks={count}"), key=5)[0]
        for count in (1, 2, 4)
    ]
    assert all(abs(a - b) > 1e-4 for a, b in pairwise(losses))


def test_a_forward_pass_restores_the_parameters() -> None:
    config = config_of("gpt2", SHARDS)
    stage = Stage.whole(config.model.n_layer)
    model = build_stage(config, stage=stage, topology=Topology(1, 1, 1), mesh=None)
    allocate(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    model(torch.zeros(1, 16, dtype=torch.int64))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with pytest.raises(IndexError):
        model(torch.full((1, 16), 260))
    assert dict(model.named_parameters()).keys() == parameters.keys()


def test_the_tree_adds_pairs_of_neighbors() -> None:
    big = 2.0**24  # of which the next number is 2 more
    values = [torch.tensor(value) for value in (big, 1.0, 1.0, 1.0)]
    assert tree_sum(values).item() == big + 2
    assert sum(values[1:], values[0]).item() == big
    assert tree_sum(values[:3]).item() == big
    assert tree_sum(values[:1]) is values[0]


def test_operands_are_contiguous_and_aligned() -> None:
    memory = torch.arange(64.0)
    assert operand(memory) is memory
    for part in (memory[1:17], memory.view(8, 8)[:, :4], memory.view(8, 8)[1:, :4]):
        copy = operand(part)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, part)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_blocks_of_tokens_divide_any_sequence(length: int) -> None:
    x = torch.arange(2.0 * length).view(2, length, 1).requires_grad_()
    blocks = Shards(4).tokens(x)
    assert len({block.shape[1] for block in blocks[:-1]}) <= 1
    assert len(blocks) <= 4
    joined = join_tokens([block * 2 for block in blocks])
    assert torch.equal(joined, x * 2)
    (joined * x.detach()).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(torch.as_tensor(x.grad), 2 * x.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_cross_entropy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 5, 12, generator=generator).to(dtype)
    logits[..., -2:] = -torch.inf  # padding
    targets = torch.randint(10, (2, 5), generator=generator)
    targets[1, 2] = -100
    whole, cut = logits.clone().requires_grad_(), logits.unflatten(-1, (4, 3)).requires_grad_()
    expected, loss = token_loss(whole, targets), virtual_shards.cross_entropy(cut, targets, shards=Shards(4))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for value in (expected, loss):
        (value * 3).backward()  # type: ignore[no-untyped-call]
    gradient = torch.as_tensor(cut.grad).flatten(2)
    torch.testing.assert_close(
        gradient, torch.as_tensor(whole.grad), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-8
    )
    assert not gradient[..., -2:].any()
    assert virtual_shards.cross_entropy(cut, torch.full((2, 5), -100), shards=Shards(4)).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 63, 64, 100])
def test_products_with_columns_in_place_have_the_bits_of_a_copy(
    dtype: torch.dtype, is_transposed: bool, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    for rows, columns, count in ((96, 64, 2), (192, 256, 4), (64, 80, 8), (96, 40, 2), (24, 8, 4)):
        whole = torch.randn(rows, columns * count, generator=generator).requires_grad_()
        expected = torch.empty_like(whole)
        sizes = (rows, columns) if is_transposed else (columns, rows)
        parts = parts_of(whole, count, 1, dtype)
        in_place = dtype == torch.float32 and columns >= 64
        assert all(is_operand(part.tensor) != in_place for part in parts)
        for number, part in enumerate(parts):
            x = torch.randn(tokens, sizes[0], generator=generator).to(dtype).requires_grad_()
            other, place = x.detach().requires_grad_(), slice(number * columns, (number + 1) * columns)
            alone = ShardWeight(whole.detach()[:, place].to(dtype).contiguous().requires_grad_(), None, 0)
            gradient = torch.randn(tokens, sizes[1], generator=generator).to(dtype)
            results = [
                product(factor, weight, None, is_transposed=is_transposed)
                for factor, weight in ((x, part), (other, alone))
            ]
            assert torch.equal(*results)
            torch.autograd.backward(results, [gradient, gradient])
            assert torch.equal(torch.as_tensor(x.grad), torch.as_tensor(other.grad))
            expected[:, place] = torch.as_tensor(alone.tensor.grad)
        assert torch.equal(torch.as_tensor(whole.grad), expected)


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_ranks_send_the_bytes_of_a_reduce_scatter_and_a_gather(
    is_sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 1 of 4, counted without other ranks: forward and backward of what stands between two sums."""
    ranks, sent, group = 4, {"halving": 0, "gather": 0}, cast(dist.ProcessGroup, object())

    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor, *_: object) -> None:
        sent["halving"] += outgoing.nbytes
        incoming.zero_()

    def gather(parts: list[torch.Tensor], chunk: torch.Tensor, group: object) -> None:
        sent["gather"] += chunk.nbytes * (len(parts) - 1)

    monkeypatch.setattr(halving, "_exchange", exchange)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    for count in (4, 8, 16):
        sent.update(halving=0, gather=0)
        shards = Shards(count, group, is_sequence_parallel)
        x = torch.zeros(2, 12 // (ranks if is_sequence_parallel else 1), 20, requires_grad=True)
        shards.join(shards.fork(x)).sum().backward()  # type: ignore[no-untyped-call]
        assert sent == dict.fromkeys(sent, 2 * 3 * 2 * 12 * 20 * 4 // 4)
