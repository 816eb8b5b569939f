"""The same bits at any tensor parallelism up to M ranks: the ranks run all products that M ranks would run.

Attention, MLP, and output layer run once per virtual shard, on the shard's heads, inner width, or vocabulary rows. A
rank runs a contiguous block of the M shards, on tensors shaped, strided and aligned as on M ranks. Sums over shards
form a tree (`shard_sums`). Between these products, any code adding over tokens or drawing a mask works on one of M
token blocks at a time. Elementwise operations and norm rows could be rounded differently in tensors with other shapes,
so these run by shard or block too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models import families
from models.layers import Conv1D, Dropout, Embedding, OutputLayer, Site
from models.network import Model
from models.spec import Cut
from trainer.parallel.shard_products import ShardWeight, local_part, parts_of, product
from trainer.parallel.shard_sums import Shards, aligned_stack, join_tokens, stacked

# A parameter, as its module and its name in the module.
_Place = tuple[nn.Module, str]


def shard(model: Model, shards: Shards, mesh: DeviceMesh | None) -> None:
    """Make a model or stage compute by virtual shards. With a mesh, cut its weights over the ranks.

    Logits become [B, T, shards on this rank, rows per shard], see `cross_entropy`. The caller must tie weights again.
    """
    spec, modules = families.spec_of(model.config), dict(model.named_modules())
    if mesh is not None:
        from torch.distributed.tensor import Shard

        from trainer.parallel.tensor import distribute

        for place, dimension in cut_parameters(model).items():
            module, _, name = place.rpartition(".")
            distribute(modules[module], mesh, **{name: Shard(dimension)})
    if shards.is_sequence_parallel:
        model.sequence_shards = shards.ranks
    for name, cut in spec.plan.ends.items():
        if name in modules:
            _replace_end(modules[name], cut, shards)
    for layer in model.stage.layers:
        prefix = f"{spec.blocks}.{layer}."
        for name, cut in spec.plan.block.items():
            module = modules[prefix + name]
            if cut is Cut.gather:
                parts = {
                    modules[prefix + inner]: inner_cut
                    for inner, inner_cut in spec.plan.block.items()
                    if inner.startswith(name + ".")
                }
                _replace(module, _ShardedModule(module, parts, shards))
            elif cut is Cut.sequence_norm:
                _replace(module, _TokenNorm(module, shards))


def cut_parameters(model: Model) -> dict[str, int]:
    """Return the parameters cut over virtual shards, by name, with their cut dimension."""
    spec, modules = families.spec_of(model.config), dict(model.named_modules())
    cuts = {name: cut for name, cut in spec.plan.ends.items() if name in modules}
    for layer in model.stage.layers:
        cuts |= {f"{spec.blocks}.{layer}.{name}": cut for name, cut in spec.plan.block.items()}
    return {
        f"{name}.{parameter}": dimension
        for name, cut in cuts.items()
        for parameter, dimension in _dimensions(modules[name], cut).items()
    }


def _dimensions(module: nn.Module, cut: Cut) -> dict[str, int]:
    """Return the dimension in which each parameter in a module is cut. Uncut parameters are left out."""
    match cut:
        case Cut.columns if isinstance(module, Conv1D):
            return {"weight": module.weight.dim() - 1, "bias": module.bias.dim() - 1}
        case Cut.rows if not isinstance(module, Conv1D):
            return {"weight": 1}
        case Cut.columns | Cut.rows | Cut.embedding | Cut.whole_embedding | Cut.output:
            return {"weight": 0}
        case _:
            return {}


def _replace_end(module: nn.Module, cut: Cut, shards: Shards) -> None:
    """Replace the forward pass of a module before or after the blocks."""
    match cut:
        case Cut.embedding | Cut.whole_embedding if shards.group is not None:
            stays_whole = cut is Cut.whole_embedding or not shards.is_sequence_parallel
            _replace(module, _VocabularyEmbedding(cast(Embedding, module), shards, stays_whole=stays_whole))
        case Cut.scatter if shards.is_sequence_parallel:
            _replace(module, _Scattered(module, shards))
        case Cut.sequence_norm:
            _replace(module, _TokenNorm(module, shards))
        case Cut.output:
            _replace(module, _VocabularyOutput(cast(OutputLayer, module), shards))
        case _:
            pass


def _replace(module: nn.Module, forward: Any) -> None:
    """Make a module call an object, which is not a submodule and has no parameters."""

    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = MethodType(call, module)


@dataclass(slots=True)
class _Projection:
    """A projection's product with a shard's part of its weight, which `use` sets."""

    module: nn.Module
    cut: Cut
    weight: ShardWeight | None = None
    bias: torch.Tensor | None = None

    def parts(self, count: int, dtype: torch.dtype) -> list[tuple[ShardWeight, torch.Tensor | None]]:
        """Return each shard's weight, with its bias if it is cut too."""
        dimensions = _dimensions(self.module, self.cut)
        columns = [
            parts_of(getattr(self.module, name), count, dimension, dtype) for name, dimension in dimensions.items()
        ]
        return [(weight, bias[0].tensor.flatten() if bias else None) for weight, *bias in zip(*columns, strict=True)]

    def use(self, weight: ShardWeight | None, bias: torch.Tensor | None) -> None:
        """Set the tensors for the next product."""
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        output = product(x, self.weight, self.bias, is_transposed=isinstance(self.module, Conv1D))
        out = self.weight.tensor.shape[1:]
        return output.view(*x.shape[:-1], *out) if len(out) > 1 else output


class _ShardedModule:
    """Attention or an MLP: its own forward pass once per shard on the rank, then the sum over all shards.

    The bias after the sum and the residual dropout run token block by token block.

    Args:
        parts: The module's projections and head norms.
    """

    def __init__(self, module: nn.Module, parts: Mapping[nn.Module, Cut], shards: Shards) -> None:
        self._module, self._shards = module, shards
        self._projections = [_Projection(part, cut) for part, cut in parts.items() if cut in (Cut.columns, Cut.rows)]
        self._head_norms = [part for part, cut in parts.items() if cut is Cut.head_norm]
        self._biased = [part for part, cut in parts.items() if cut is Cut.rows and isinstance(part, Conv1D)]
        dropouts = {child.site: child for child in module.children() if isinstance(child, Dropout)}
        self._attention_dropout = dropouts.pop(Site.attention, None)
        self._residual_dropout = next(iter(dropouts.values()), None)
        for projection in self._projections:
            _replace(projection.module, projection)
        if self._residual_dropout is not None:
            _replace(self._residual_dropout, _unchanged)

    def __call__(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        shards = self._shards
        weights = [projection.parts(shards.share, x.dtype) for projection in self._projections]
        places = [(norm, "weight") for norm in self._head_norms]
        norms: Sequence[Sequence[torch.Tensor]] = [()] * shards.share
        if places:
            norms = shards.copies([_weight(norm) for norm in self._head_norms], shards.share, over_ranks=True)
        outputs = []
        for number, (hidden, uses) in enumerate(zip(shards.fork(x), norms, strict=True)):
            if self._attention_dropout is not None:
                self._attention_dropout.shard = shards.first + number
            for projection, parts in zip(self._projections, weights, strict=True):
                projection.use(*parts[number])
            with _replaced_parameters(places, uses):
                outputs.append(type(self._module).forward(self._module, hidden, *args))
        for projection in self._projections:
            projection.use(None, None)
        return self._residual(shards.join(outputs), args[-1] if args else None)

    def _residual(self, x: torch.Tensor, key: int | None) -> torch.Tensor:
        shards, dropout = self._shards, self._residual_dropout
        drops = dropout is not None and key is not None and dropout.p > 0
        if not (self._biased or drops):
            return x
        blocks = shards.tokens(x)
        if self._biased:
            biases = [part.bias for part in self._biased]
            uses = shards.copies(biases, len(blocks), over_ranks=shards.is_sequence_parallel)
            blocks = [block + bias.to(block.dtype) for block, (bias,) in zip(blocks, uses, strict=True)]
        if drops:
            assert dropout is not None
            for number, block in enumerate(blocks):
                dropout.shard = shards.first_block + number
                blocks[number] = Dropout.forward(dropout, block, key)
        return join_tokens(blocks)


def _unchanged(x: torch.Tensor, key: int | None) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True)
class _TokenNorm:
    """A norm over hidden states, token block by token block."""

    norm: nn.Module
    shards: Shards

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shards, blocks = self.shards, self.shards.tokens(x)
        places = [(self.norm, name) for name, _ in self.norm.named_parameters(recurse=False)]
        weights = [getattr(self.norm, name) for _, name in places]
        uses = shards.copies(weights, len(blocks), over_ranks=shards.is_sequence_parallel)
        outputs = []
        for block, tensors in zip(blocks, uses, strict=True):
            with _replaced_parameters(places, tensors):
                outputs.append(type(self.norm).forward(self.norm, block))
        return join_tokens(outputs)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Embedding dropout over all tokens, and this rank's part of its output."""

    dropout: nn.Module
    shards: Shards

    def __call__(self, x: torch.Tensor, key: int | None) -> torch.Tensor:
        return self.shards.scatter(type(self.dropout).forward(self.dropout, x, key))


@dataclass(frozen=True, slots=True)
class _VocabularyEmbedding:
    """A table cut by rows: a rank looks up its own tokens, then ranks add their vectors.

    Another rank's token has the vector -0.0, which leaves every number unchanged in a sum, so a lookup has no rounding.
    """

    embedding: Embedding
    shards: Shards
    stays_whole: bool

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        table, shards = local_part(self.embedding.weight), self.shards
        rows = tokens - shards.first // shards.share * table.shape[0]
        is_elsewhere = (rows < 0) | (rows >= table.shape[0])
        vectors = F.embedding(rows.masked_fill(is_elsewhere, 0), table)
        vectors = vectors.masked_fill(is_elsewhere.unsqueeze(-1), -0.0)
        ranks = Shards(shards.ranks, shards.group, is_sequence_parallel=not self.stays_whole)
        return ranks.join([vectors])


@dataclass(frozen=True, slots=True)
class _VocabularyOutput:
    """The projection onto the vocabulary, once per shard. Logits are [B, T, shards on this rank, rows per shard]."""

    output: OutputLayer
    shards: Shards

    def __call__(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        shards = self.shards
        weights = parts_of(self.output.weight if table is None else table, shards.share, 0, x.dtype)
        rows, logits, uses = weights[0].tensor.shape[0], list[torch.Tensor](), shards.fork(x)
        memory = aligned_stack(shards.share, (*uses[0].shape[:-1], rows), x)
        for number, (hidden, weight) in enumerate(zip(uses, weights, strict=True)):
            padding = min(rows, max(0, (shards.first + number + 1) * rows - self.output.vocab_size))
            mask = None
            if padding:
                mask = torch.cat((hidden.new_zeros(rows - padding), hidden.new_full((padding,), -torch.inf)))
            logits.append(product(hidden, weight, mask, is_transposed=False, out=memory[number]))
        return stacked(logits, memory).permute(1, 2, 0, 3)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, shards: Shards) -> torch.Tensor:
    """Return the mean cross entropy, 0-d float32, equal on all ranks. A collective call with several ranks.

    Args:
        logits: [batch, sequence, shards on this rank, rows per shard].
        targets: int64 [batch, sequence], in the whole vocabulary. -100 is ignored. If all are ignored, the result is
            NaN.
    """
    return cast(torch.Tensor, _CrossEntropy.apply(logits, targets, shards))  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over shards. The maximum is exact in any order. Exponentials and the target logits use the tree."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shards: Shards) -> torch.Tensor:
        blocks = [block.float() for block in logits.unbind(2)]
        highest = blocks[0].amax(-1)
        for block in blocks[1:]:
            highest = torch.maximum(highest, block.amax(-1))
        if shards.group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shards.group)
        rows, sums, places = blocks[0].shape[-1], list[torch.Tensor](), []
        exponentials = aligned_stack(len(blocks), blocks[0].shape, blocks[0])
        for number, (block, shifted) in enumerate(zip(blocks, exponentials, strict=True)):
            torch.sub(block, highest.unsqueeze(-1), out=shifted)
            at = targets - (shards.first + number) * rows
            is_in_shard = (at >= 0) & (at < rows)
            at = at.clamp(0, rows - 1).unsqueeze(-1)
            target = shifted.gather(-1, at).squeeze(-1).masked_fill(~is_in_shard, 0.0)
            sums.append(torch.stack((shifted.exp_().sum(-1), target)))
            places.append((at, is_in_shard))
        total, target = shards.total(sums).unbind()
        is_counted = targets != -100
        losses = (total.log() - target).masked_fill(~is_counted, 0.0)
        count = is_counted.sum()
        ctx.save_for_backward(total, is_counted / count, exponentials)
        ctx.places, ctx.dtype = places, logits.dtype
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total, share, exponentials = ctx.saved_tensors
        scale = (share * gradient).unsqueeze(-1)
        gradients = exponentials
        if ctx.dtype != exponentials.dtype:
            gradients = aligned_stack(len(exponentials), exponentials.shape[1:], total.new_empty(0, dtype=ctx.dtype))
        for block, result, (at, is_in_shard) in zip(exponentials, gradients, ctx.places, strict=True):
            block.mul_(scale / total.unsqueeze(-1))
            block.scatter_add_(-1, at, -scale.masked_fill(~is_in_shard.unsqueeze(-1), 0.0))
            if gradients is not exponentials:
                result.copy_(block)
        return gradients.permute(1, 2, 0, 3), None, None


@contextmanager
def _replaced_parameters(places: Sequence[_Place], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Temporarily replace modules' parameters with other tensors."""
    parameters = [module._parameters[name] for module, name in places]
    try:
        for (module, name), tensor in zip(places, tensors, strict=True):
            module._parameters[name] = cast(nn.Parameter, tensor)
        yield
    finally:
        for (module, name), parameter in zip(places, parameters, strict=True):
            module._parameters[name] = parameter


def _weight(norm: nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, norm.weight)
