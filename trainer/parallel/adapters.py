"""Low-rank adapters, added to a model's projections from outside and divided over tensor-parallel ranks.

In a column-parallel projection A is whole and B is cut; in a row-parallel projection A is cut and B is whole. Their
product is added to the projection's own before tensor parallelism sums or gathers it, so the forward pass needs no
further message. A whole factor's gradient is a sum over ranks, because each rank computes a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from models.adapters import adapted_modules, adapter_tensors, scale_of, stored_name
from models.config import StoredTensor
from models.families import spec_of
from models.layers import seed_site
from models.network import Model
from models.spec import Cut

_FIRST_SITE = 1 << 32  # `models.layers.Site` uses the sites below it


def add_adapters(model: Model, mesh: DeviceMesh | None) -> None:
    """Add the factors A and B, without values, to each adapted projection in a model or stage.

    Call it after tensor parallelism and before FSDP2.

    Args:
        mesh: The model's one-dimensional tensor-parallel mesh, or None.
    """
    config, spec = model.config, spec_of(model.config)
    tensors = adapter_tensors(config)
    for layer, block in model.blocks.items():
        prefix = f"{spec.blocks}.{layer}."
        dropouts = list[AdapterDropout]()
        for module in (name for name in adapted_modules(config) if name.startswith(prefix)):
            within = module.removeprefix(prefix)
            cut, projection = spec.plan.block[within], block.get_submodule(within)
            rank = 0 if mesh is None or cut is Cut.columns else mesh.get_local_rank()
            dropout = AdapterDropout(config.lora.dropout, within, layer=int(layer), shard=rank)
            for factor in ("lora_A", "lora_B"):
                tensor = tensors[stored_name(f"{module}.{factor}.weight")]
                projection.add_module(factor, _Factor(tensor, mesh, _placement(factor, cut, tensor)))
            update = _Update(scale_of(config), dropout, cut, mesh)
            # Before the hooks in which tensor parallelism lays out the output.
            projection.register_forward_hook(update, prepend=True)
            dropouts.append(dropout)
        if config.lora.dropout:
            block.register_forward_pre_hook(partial(_pass_key, dropouts))


def _placement(factor: str, cut: Cut, tensor: StoredTensor) -> Placement:
    """Return a factor's placement: A [rank, in] cut by inputs, B [..., out, rank] cut by outputs, or replicated."""
    match factor, cut:
        case "lora_A", Cut.rows:
            return Shard(1)
        case "lora_B", Cut.columns:
            return Shard(len(tensor.view) - 2)
        case _:
            return Replicate()


def _pass_key(dropouts: list[AdapterDropout], _: nn.Module, inputs: tuple[object, ...]) -> None:
    """Pass a block's dropout key, its last input, to its adapters. Also runs when the block is recomputed."""
    key = inputs[-1]
    assert key is None or isinstance(key, int)
    for dropout in dropouts:
        dropout.key = key


class _Factor(nn.Module):
    """An adapter factor, with `weight` in its live form."""

    def __init__(self, tensor: StoredTensor, mesh: DeviceMesh | None, placement: Placement) -> None:
        super().__init__()
        weight = torch.empty(tensor.view, device="meta")
        self.weight = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [placement]))


@dataclass(slots=True)
class AdapterDropout:
    """Dropout on an adapter's input. Its mask depends only on key, module, layer and shard.

    Args:
        module: The projection's name within its block.
        shard: The tensor-parallel coordinate if ranks hold different parts of the input, else 0.
        key: The current pass's key. None disables dropout.
    """

    p: float
    module: str
    layer: int
    shard: int
    key: int | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of `x`, which has any shape."""
        if self.key is None or self.p == 0:
            return x
        site = _FIRST_SITE + xxhash.xxh32_intdigest(self.module.encode())
        seed_site(self.key, site, layer=self.layer, shard=self.shard, device=x.device)
        return F.dropout(x, self.p)


@dataclass(frozen=True, slots=True)
class _Update:
    """A hook adding `scale B A x` to a projection's output, as PEFT's `Linear.forward` does."""

    scale: float
    dropout: AdapterDropout
    cut: Cut
    mesh: DeviceMesh | None

    def __call__(self, projection: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(projection, name).weight for name in ("lora_A", "lora_B"))
        if self.mesh is None:
            return output + self._product(inputs[0], first, second)
        from trainer.parallel.tensor import on_mesh

        by_columns = self.cut is Cut.columns
        summed = {"grad_placements": (Partial(),)}
        x = on_mesh(inputs[0], self.mesh).to_local(**(summed if by_columns else {}))
        a = first.to_local(**(summed if by_columns else {}))
        b = second.to_local(**({} if by_columns else summed))
        product = self._product(x, a, b)
        if not isinstance(output, DTensor):
            return output + product
        placement = Shard(-1) if by_columns else Partial()
        return output + DTensor.from_local(product, self.mesh, (placement,), run_check=False)

    def _product(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the update [..., out], or [..., parts, out] for a fused projection."""
        low = F.linear(self.dropout(x), first.to(x.dtype))
        product = F.linear(low, second.to(x.dtype).flatten(0, -2)) * self.scale
        return product.view(*x.shape[:-1], *second.shape[:-1])
