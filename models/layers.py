"""The small modules and functions that all families are built of.

Parameters are float32 masters, allocated and not filled; each is cast to the dtype of the activations where it is used,
which does nothing when a wrapper has cast it already. No architecture lives here.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_MASK64 = (1 << 64) - 1

_Function = TypeVar("_Function", bound=Callable[..., Any])
_uncompiled = cast(Callable[[_Function], _Function], torch.compiler.disable)


class Site(IntEnum):
    """A place in the model that draws a dropout mask; the numbers are part of every seed and never change."""

    embedding = 0
    attention = 1
    attention_residual = 2
    mlp_residual = 3


def site_seed(key: int, site: Site, *, layer: int, shard: int = 0) -> int:
    """Return the 64-bit seed of one dropout mask.

    `layer` is the global layer number, `shard` the coordinate where ranks hold different parts of one activation.
    """
    state = key & _MASK64
    for word in (layer, site, shard):
        state = splitmix64(state ^ splitmix64(word))
    return state


def splitmix64(state: int) -> int:
    """Return the next 64-bit output of the generator at `state`.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA; constants of
    java.util.SplittableRandom.
    """
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed_site(key: int, site: Site, *, layer: int, shard: int, device: torch.device) -> None:
    """Seed the default generator of `device` for the mask that is drawn next."""
    seed = site_seed(key, site, layer=layer, shard=shard)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Dropout(nn.Module):
    """Dropout whose mask is a function of a key, the site and the shard: never of what was drawn before.

    `shard` is 0 unless tensor parallelism sets it from outside, where ranks hold different parts of the activation.
    """

    def __init__(self, p: float, site: Site, *, layer: int) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.layer = layer
        self.shard = 0

    def seed(self, key: int | None, device: torch.device) -> float:
        """Seed the mask that the caller draws next and return its probability: 0 without a key."""
        if key is None or self.p == 0:
            return 0.0
        self._seed(key, device)
        return self.p

    @_uncompiled
    def _seed(self, key: int, device: torch.device) -> None:
        # Site and layer are read here and not before, so that one compiled graph serves every layer.
        seed_site(key, self.site, layer=self.layer, shard=self.shard, device=device)

    def forward(self, x: Tensor, key: int | None) -> Tensor:
        """Drop elements of `x`, of any shape; without a key return `x` itself."""
        p = self.seed(key, x.device)
        return F.dropout(x, p) if p else x

    def extra_repr(self) -> str:
        """Describe the site in `repr(model)`."""
        return f"p={self.p}, site={self.site.name}, layer={self.layer}, shard={self.shard}"


class Embedding(nn.Embedding):
    """A table of vectors, `weight` [rows, width], as transformers stores it.

    `fuses_tied_gradient` is set if the output layer shares it.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.fuses_tied_gradient = False

    def reset_parameters(self) -> None:
        """Leave the values as allocated."""

    def look_up(self, tokens: Tensor, output: nn.Linear | None) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of `tokens` [...], as [..., width], and the table for `output`, where it is lent.

        Whoever gets the table must use that in place of the weight. Nothing is lent where the weight of `output` is
        another by now, or where hooks wait for this module to be called.
        """
        hooks = self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks
        if not self.fuses_tied_gradient or output is None or output.weight is not self.weight or any(hooks):
            return cast(Tensor, self(tokens)), None
        return cast(tuple[Tensor, Tensor], _TiedEmbedding.apply(self.weight, tokens))  # type: ignore[no-untyped-call]


class _TiedEmbedding(torch.autograd.Function):
    """Looks tokens up in a table and hands the table on, so that the gradients of both uses come back together.

    They come as the output's whole table and the rows of a few tokens, which are added to it, in place unless there is
    to be a graph of the gradient. Two uses of a Parameter would have autograd fill a second table for those rows, and
    add all of it.
    """

    @staticmethod
    def forward(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(tokens, table), table.view_as(table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        _, tokens = inputs
        ctx.save_for_backward(tokens)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, table: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        add = table.index_add if torch.is_grad_enabled() else table.index_add_
        return add(0, tokens.flatten(), rows.flatten(0, -2)), None


def tie(embedding: Embedding, output: nn.Linear) -> None:
    """Make the output's weight the embedding's Parameter itself."""
    output.weight = embedding.weight
    # A DTensor's rows lie on several ranks, and on CUDA torch sorts tokens before it adds their rows.
    embedding.fuses_tied_gradient = type(embedding.weight.data) is Tensor and embedding.weight.device.type == "cpu"


class Linear(nn.Linear):
    """A projection without bias, `weight` [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Leave the values as allocated."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


class Conv1D(nn.Module):
    """A projection in GPT-2's orientation, `weight` [in, out] and `bias` [out]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype).t(), self.bias.to(x.dtype))


class FusedConv1D(nn.Module):
    """Several projections of one input in one product, `weight` [in, parts, out] and `bias` [parts, out].

    In C order these are the bytes of GPT-2's [in, parts * out] and [parts * out]; with the parts in a dimension of
    their own, cutting the last dimension gives every rank the same heads of each part.
    """

    def __init__(self, in_features: int, parts: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, parts, out_features))
        self.bias = nn.Parameter(torch.empty(parts, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., parts, out]."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.linear(x, weight.flatten(1).t(), bias.flatten()).view(*x.shape[:-1], *bias.shape)


class LayerNorm(nn.Module):
    """Layer normalisation, `weight` and `bias` [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, `weight` [width]. Source: `LlamaRMSNorm` of transformers."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class OutputLayer(nn.Linear):
    """The projection onto the vocabulary, `weight` [rows, width], with the columns of padding rows masked."""

    def __init__(self, width: int, rows: int, vocab_size: int) -> None:
        super().__init__(width, rows, bias=False)
        self.vocab_size = vocab_size

    def reset_parameters(self) -> None:
        """Leave the values as allocated."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """Map [..., width] to logits [..., rows]; -inf in the columns of padding, which get no gradient.

        `table` is what `Embedding.look_up` gave in place of the weight.
        """
        weight = (self.weight if table is None else table).to(x.dtype)
        padding = weight.shape[0] - self.vocab_size  # a DTensor's shape is that of the whole table
        if padding == 0:
            return F.linear(x, weight)
        # As a bias of the product the mask costs no pass over the logits, which are the largest tensor of the model.
        mask = torch.cat((x.new_zeros(self.vocab_size), x.new_full((padding,), -torch.inf)))
        return F.linear(x, weight, mask)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Attend to the own and earlier positions.

    `q` is [B, T, heads, head_dim], `k` and `v` are [B, T, kv_heads, head_dim] with kv_heads a divisor of heads. Returns
    [B, T, heads * head_dim].
    """
    grouped = k.shape[2] != q.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=grouped)
    return attended.transpose(1, 2).flatten(2)


def run_block(block: nn.Module, *inputs: object, recompute: bool) -> Tensor:
    """Run one block; with `recompute` keep only its inputs for the backward pass and run it again there."""
    if not (recompute and torch.is_grad_enabled()):
        return cast(Tensor, block(*inputs))
    # Every dropout site seeds its own generator from its arguments, so there is no generator state to restore.
    return cast(Tensor, checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False))


def as_key(key: int | Tensor | None) -> int | None:
    """Return a dropout key as an integer.

    Pipeline schedules split tensors, not integers, over micro batches: there a key comes as one int64 element.
    """
    return int(key) if isinstance(key, Tensor) else key


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, 0-d float32.

    `logits` is [B, T, vocabulary], `targets` int64 [B, T]; targets of -100 are left out. NaN when all are left out.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
