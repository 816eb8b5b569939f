"""Modules and functions shared by all model families.

Parameters are uninitialized float32 master weights. Each module casts them to its input's dtype, a no-op if a
wrapper such as FSDP has cast them already.
"""

from enum import IntEnum
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

_MASK64 = (1 << 64) - 1


class Site(IntEnum):
    """A dropout site in the model. The numbers enter every seed and never change."""

    embedding = 0
    attention = 1
    attention_residual = 2
    mlp_residual = 3


def site_seed(key: int, site: int, *, layer: int, shard: int = 0) -> int:
    """Return the 64-bit seed for a dropout mask.

    `site` is a `Site`, or a number from 2^32 on for a site added from outside. `layer` is the global layer number,
    `shard` the rank's coordinate where ranks hold different parts of an activation.
    """
    state = key & _MASK64
    for word in (layer, site, shard):
        state = splitmix64(state ^ splitmix64(word))
    return state


def splitmix64(state: int) -> int:
    """Return the generator's next 64-bit output after `state`.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA; constants from
    java.util.SplittableRandom.
    """
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed_site(key: int, site: int, *, layer: int, shard: int, device: torch.device) -> None:
    """Seed the device's default generator for the next mask."""
    seed = site_seed(key, site, layer=layer, shard=shard)
    if device.type in ("cpu", "meta"):
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).default_generators[device.index].manual_seed(seed)


class Dropout(nn.Module):
    """Dropout whose mask depends only on the key, site, layer and shard, not on earlier draws.

    Tensor parallelism sets `shard` where ranks hold different parts of the activation; elsewhere it is 0.
    """

    def __init__(self, p: float, site: Site, *, layer: int) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.layer = layer
        self.shard = 0

    def seed(self, key: int | None, device: torch.device) -> float:
        """Seed the generator for the caller's next mask and return its drop probability, 0 without a key."""
        if key is None or self.p == 0:
            return 0.0
        if torch.compiler.is_compiling():
            self._seed_outside_graph(key, device)
        else:
            self._seed(key, device)
        return self.p

    def _seed(self, key: int, device: torch.device) -> None:
        seed_site(key, self.site, layer=self.layer, shard=self.shard, device=device)

    # Site and layer are read outside the compiled graph, so that one graph serves every layer. torch.compiler.disable
    # would import torch._dynamo here, which takes 0.8 s; this imports it at its first call.
    _seed_outside_graph = _disable_dynamo(_seed)

    def forward(self, x: Tensor, key: int | None) -> Tensor:
        """Apply dropout to `x`, which may have any shape. Without a key return `x` itself."""
        p = self.seed(key, x.device)
        return F.dropout(x, p) if p else x

    def extra_repr(self) -> str:
        """Describe the site in `repr(model)`."""
        return f"p={self.p}, site={self.site.name}, layer={self.layer}, shard={self.shard}"


class Embedding(nn.Embedding):
    """An embedding table, `weight` [rows, width], oriented as in transformers.

    `tie` sets `fuses_tied_gradient` if the output layer shares the table and both gradients can be added in place.
    Callers set `adds_tokens_first` to add rows for equal tokens before they meet the output layer's gradient, and
    `output_gradient` to keep the output layer's gradient apart altogether.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.fuses_tied_gradient = False
        self.adds_tokens_first = False
        self.output_gradient: OutputGradient | None = None

    def reset_parameters(self) -> None:
        """Do nothing: the values stay as allocated."""

    def look_up(self, tokens: Tensor, output: nn.Linear | None) -> tuple[Tensor, Tensor | None]:
        """Return the vectors [..., width] for `tokens` [...], and the table for `output` or None.

        The caller must pass the table to `output` in place of its weight. It is None if gradients are neither kept
        apart nor fused. They are not fused if `output` has another weight by now, or if this module has hooks, which
        run only when the module is called.
        """
        if self.output_gradient is not None and output is not None and torch.is_grad_enabled():
            return cast(Tensor, self(tokens)), self.output_gradient.leaf(self.weight)
        hooks = self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks
        if not self.fuses_tied_gradient or output is None or output.weight is not self.weight or any(hooks):
            return cast(Tensor, self(tokens)), None
        applied = _TiedEmbedding.apply(self.weight, tokens, self.adds_tokens_first)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Tensor], applied)


class _TiedEmbedding(torch.autograd.Function):
    """Looks up tokens and returns the table for the output layer, so a single backward gets both gradients.

    The backward adds the tokens' gradient rows to the output's full gradient, in place unless the caller requests a
    gradient graph. If the Parameter were used twice, autograd would allocate a second full table for these rows and
    add all its rows.
    """

    @staticmethod
    def forward(table: Tensor, tokens: Tensor, adds_tokens_first: bool) -> tuple[Tensor, Tensor]:
        return F.embedding(tokens, table), table.view_as(table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
        _, tokens, ctx.adds_tokens_first = inputs
        ctx.save_for_backward(tokens)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, table: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        places, rows = tokens.flatten(), rows.flatten(0, -2)
        if ctx.adds_tokens_first:
            places, which = places.unique(return_inverse=True)
            rows = rows.new_zeros(len(places), rows.shape[1]).index_add(0, which, rows)
        add = table.index_add if torch.is_grad_enabled() else table.index_add_
        return add(0, places, rows), None, None


class OutputGradient:
    """Accumulates a tied table's gradient from the output layer, apart from the embedding's.

    Autograd adds the two within each backward pass. Pipeline stages with a copy each add them after all passes.
    Kept apart, both are added in the same order everywhere.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def leaf(self, table: Tensor) -> Tensor:
        """Return the table for the output layer in a forward pass: the same memory, with its own gradient."""
        leaf = table.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
        return leaf

    def take(self) -> Tensor:
        """Return the gradient accumulated since the last call."""
        gradient, self._sum = self._sum, None
        assert gradient is not None, "no backward pass since the last call"
        return gradient

    def _accumulate(self, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)


def tie(embedding: Embedding, output: nn.Linear) -> None:
    """Tie the output layer to the embedding: both use the same Parameter."""
    output.weight = embedding.weight
    # Not for a DTensor, whose rows are sharded, and not on CUDA, where torch sorts tokens before it adds their rows.
    embedding.fuses_tied_gradient = type(embedding.weight.data) is Tensor and embedding.weight.device.type == "cpu"


class Linear(nn.Linear):
    """A linear projection without bias, `weight` [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing: the values stay as allocated."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


class Conv1D(nn.Module):
    """A projection in GPT-2's orientation, `weight` [in, ...out] and `bias` [...out].

    Fused projections have `out` [parts, out]: in C order their bytes equal GPT-2's [in, parts * out] and [parts * out].
    Because the parts have their own dimension, sharding the last dimension gives every rank the same heads in each.
    """

    def __init__(self, in_features: int, *out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, *out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., ...out]."""
        return project(x, self.weight, self.bias)


def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the product of `x` [..., in] and a `Conv1D`'s weight, plus its bias, [..., ...out]."""
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    product = F.linear(x, weight.flatten(1).t(), bias.flatten())
    return product if bias.dim() == 1 else product.view(*x.shape[:-1], *bias.shape)


class LayerNorm(nn.Module):
    """Layer normalization, `weight` and `bias` [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square normalization in float32, `weight` [width]. Source: transformers' `LlamaRMSNorm`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class OutputLayer(nn.Linear):
    """The projection to the vocabulary, `weight` [rows, width], which masks logits for padding rows."""

    def __init__(self, width: int, rows: int, vocab_size: int) -> None:
        super().__init__(width, rows, bias=False)
        self.vocab_size = vocab_size

    def reset_parameters(self) -> None:
        """Do nothing: the values stay as allocated."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """Map [..., width] to logits [..., rows]. Padding rows get -inf and no gradient.

        Args:
            table: The table from `Embedding.look_up`, used in place of the weight.
        """
        weight = (self.weight if table is None else table).to(x.dtype)
        padding = weight.shape[0] - self.vocab_size  # a DTensor has the whole table's shape
        if padding == 0:
            return F.linear(x, weight)
        # As the product's bias, the mask needs no extra pass over the logits, the model's largest activation.
        mask = torch.cat((x.new_zeros(self.vocab_size), x.new_full((padding,), -torch.inf)))
        return F.linear(x, weight, mask)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    """Return causal attention, [B, T, heads * head_dim].

    Args:
        q: [B, T, heads, head_dim].
        k: [B, T, kv_heads, head_dim], where kv_heads divides heads; `v` has the same shape.
        mask: The mask from `attention_mask`, to attend within documents only. None attends to all earlier tokens.
    """
    grouped = k.shape[2] != q.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if grouped and mask is not None and q.is_cuda:  # no fused kernel there takes both a mask and groups
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        grouped = False
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None, enable_gqa=grouped
    )
    return attended.transpose(1, 2).flatten(2)


def attention_mask(starts: Tensor) -> Tensor:
    """Return which tokens each token attends to, bool [B, 1, T, T]: itself and those before it in its document.

    Args:
        starts: int64 [B, T], the position in the sequence at which each token's document begins.
    """
    positions = torch.arange(starts.shape[1], device=starts.device)
    is_before = positions <= positions.unsqueeze(1)
    return (is_before & (positions >= starts.unsqueeze(2))).unsqueeze(1)


def document_positions(starts: Tensor) -> Tensor:
    """Return each token's position in its document, int64 [B, T]. `attention_mask` describes `starts`."""
    return torch.arange(starts.shape[1], device=starts.device) - starts


def run_block(block: nn.Module, *inputs: object, recompute: bool) -> Tensor:
    """Run a block; with `recompute`, keep only its inputs and run it again in the backward pass."""
    if not (recompute and torch.is_grad_enabled()):
        return cast(Tensor, block(*inputs))
    # Every dropout site seeds the generator from its arguments, so there is no generator state to restore.
    return cast(Tensor, checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False))


def as_key(key: int | Tensor | None) -> int | None:
    """Return a dropout key as an integer.

    Pipeline schedules split only tensors over micro-batches, so they pass a key as a single-element int64 tensor.
    """
    return int(key) if isinstance(key, Tensor) else key


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, 0-d float32.

    `logits` is [B, T, vocabulary], `targets` int64 [B, T]. Targets equal to -100 are ignored. The loss is NaN if all
    are.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
