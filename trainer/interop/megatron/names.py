"""Maps Megatron-Core's tensors to ours: names, fused projections, orientation, padded vocabulary. Pure.

A mapping applies to a weight and to its moments alike. All tensors here are full: joined over tensor- and
pipeline-parallel ranks. Sources: `megatron/core/models/gpt/gpt_model.py`, `transformer/attention.py`
(`SelfAttention.get_query_key_value_tensors`) and `transformer/mlp.py` in megatron-core 0.16.

Letters in shapes: H hidden size, F MLP width, A heads, G query groups, D head width, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import assert_never

import torch

from models.config import Family, ModelConfig, StoredTensor
from models.families import FAMILIES, spec_of, stored_tensors
from models.megatron_names import MegatronForm, MegatronNames, MegatronPart
from models.spec import OUTPUT
from reprise.errors import MismatchError
from trainer.interop.projections import join_groups, split_groups
from trainer.interop.stored import Shape

LAYERS = "decoder.layers"
Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """A tensor in a `GPTModel`, or a single layer in it.

    Args:
        name: The name within the model, or within the layer if `layer` is set.
        layer: The layer's number in the whole model, from 0, or the sub-block's. None outside the layers.
        shape: The full shape for a layer, with padded vocabulary rows.
        cut: The dimension split by tensor parallelism. None if every rank holds the full tensor.
        is_gated: Whether it stacks gate above up. Each rank holds a part of both, so the ranks' concatenated tensors
            are gate 0, up 0, gate 1, up 1.
    """

    name: str
    layer: int | None
    shape: Shape
    cut: int | None = None
    is_gated: bool = False

    @property
    def stacked(self) -> str:
        """Return the name in a file that stacks all layers along dimension 0."""
        return self.name if self.layer is None else f"{LAYERS}.{self.name}"

    @property
    def numbered(self) -> str:
        """Return the name in a file with separate tensors for each layer."""
        return self.name if self.layer is None else f"{LAYERS}.{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class Correspondence:
    """A Megatron tensor and our tensors in it.

    Args:
        names: Our stored names, several for fused projections.
        split: Returns our tensors, in the order of `names`, from Megatron's. They may be views.
        join: Returns Megatron's tensor from ours, without padded vocabulary rows.
    """

    tensor: MegatronTensor
    names: tuple[str, ...]
    split: Split
    join: Join

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return our tensor `name` from Megatron's."""
        return self.split(tensor)[self.names.index(name)]


def names_of(family: Family, *, where: object) -> MegatronNames:
    """Return a family's Megatron names.

    Raises:
        MismatchError: The family's spec has no Megatron names.
    """
    if (names := FAMILIES[family].megatron) is None:
        raise MismatchError(
            f"The family {family.value} has no Megatron names, so it cannot be converted",
            where=where,
            expected="model.family=" + " or ".join(family.value for family, spec in FAMILIES.items() if spec.megatron),
            found=f"model.family={family.value}",
            fix="Export it as `hf` or `dcp`, which have transformers' names.",
        )
    return names


def correspondences(config: ModelConfig, padded_vocab_size: int | None = None) -> list[Correspondence]:
    """Return a model's tensors in `GPTModel.sharded_state_dict` order, with our tensors in each.

    Each of ours appears exactly once.

    Args:
        padded_vocab_size: Rows in Megatron's embedding and output layer. `split` drops those beyond
            `config.vocab_size`. By default there are none.

    Raises:
        MismatchError: The family's spec has no Megatron names.
    """
    rows = config.vocab_size if padded_vocab_size is None else padded_vocab_size
    spec, names = spec_of(config), names_of(config.family, where="the model")
    stored, block = stored_tensors(config), spec.block(config)
    builder, last = partial(_correspondence, config, rows), names.last
    if not config.tie_word_embeddings:
        last = (*last, MegatronPart("output_layer.weight", (OUTPUT,), MegatronForm.vocabulary, cut=0))
    layers = [(layer, f"{spec.blocks}.{layer}.") for layer in range(config.n_layer)]
    tensors = [builder(stored, part) for part in names.first]
    tensors += [builder(block, part, layer, prefix) for layer, prefix in layers for part in names.block]
    tensors += [builder(stored, part) for part in last]
    assert {name for tensor in tensors for name in tensor.names} == set(stored)
    return tensors


def is_norm(tensor: MegatronTensor) -> bool:
    """Return whether a tensor is a norm weight, which Megatron may store minus 1 (`apply_layernorm_1p`)."""
    return tensor.name.endswith(("norm_weight", "norm.weight"))


def _correspondence(
    config: ModelConfig,
    rows: int,
    stored: Mapping[str, StoredTensor],
    part: MegatronPart,
    layer: int | None = None,
    prefix: str = "",
) -> Correspondence:
    """Return the correspondence for a part of the whole model, or of a layer.

    Args:
        rows: Rows in Megatron's tables.
        stored: The model's tensors, or a block's.
        prefix: Prefix of the layer's stored names.
    """
    shape, split, join = _form(part.form, stored[part.stored[0]].shape, config, rows)
    tensor = MegatronTensor(part.name, layer, shape, part.cut, is_gated=part.form is MegatronForm.gated)
    return Correspondence(tensor, tuple(prefix + name for name in part.stored), split, join)


def _form(form: MegatronForm, first: Shape, config: ModelConfig, rows: int) -> tuple[Shape, Split, Join]:
    """Return a Megatron tensor's shape, given our first tensor's, with the functions for `Correspondence`."""
    dims = first[1:]
    match form:
        case MegatronForm.plain:
            return first, lambda tensor: (tensor,), itemgetter(0)
        case MegatronForm.transposed:
            return first[::-1], lambda tensor: (tensor.T,), lambda parts: parts[0].T
        case MegatronForm.vocabulary:
            return (rows, *dims), lambda tensor: (tensor[: config.vocab_size],), itemgetter(0)
        case MegatronForm.query_groups:
            fused = (config.n_head + 2 * config.n_kv_head) * config.head_width
            return (fused, *dims), partial(split_groups, config=config), partial(join_groups, config=config)
        case MegatronForm.fused_query_groups:  # a group per head; the stored rows are the last dimension
            return (
                first[::-1],
                lambda tensor: (torch.cat(split_groups(tensor, config)).movedim(0, -1),),
                lambda parts: join_groups(parts[0].movedim(-1, 0).chunk(3), config),
            )
        case MegatronForm.gated:
            return (2 * first[0], *dims), lambda tensor: tensor.chunk(2), lambda parts: torch.cat(list(parts))
        case _:
            assert_never(form)
