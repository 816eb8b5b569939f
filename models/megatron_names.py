"""A family's tensors and arguments in Megatron-LM as data, used in both directions. Without torch.

Sources: `megatron/core/models/gpt/gpt_model.py`, `transformer/attention.py` and `transformer/mlp.py` of megatron-core
0.16; `megatron/training/arguments.py` of Megatron-LM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

POSITIONS = "position_embedding_type"
ABSENT = (False, None)  # an argument's values for a part that a family does not have


class MegatronForm(Enum):
    """How a Megatron tensor holds the stored tensors."""

    plain = "the stored tensor itself"
    transposed = "[out, in] of a stored [in, out]"
    vocabulary = "the stored table and rows of padding"
    query_groups = "stored queries, keys and values, ordered by query group"
    fused_query_groups = "the same of one stored tensor, [..., queries | keys | values]"
    gated = "the stored gate above the stored up projection"


@dataclass(frozen=True, slots=True)
class MegatronPart:
    """A `GPTModel` tensor and the stored tensors in it.

    Args:
        name: The name within the model, or within the layer for a block's tensor.
        stored: Transformers' names, within the block for a block's tensor.
        cut: The dimension sharded by tensor parallelism. None if every rank holds the whole tensor.
    """

    name: str
    stored: tuple[str, ...]
    form: MegatronForm = MegatronForm.plain
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class MegatronNames:
    """A family's arguments and tensors in Megatron-LM.

    Args:
        arguments: The arguments for every model in the family, `POSITIONS` included, with their possible values: an
            export writes the first, an import refuses all others. None also stands for a missing argument.
        first: The tensors before the layers.
        block: A layer's tensors.
        last: the tensors behind the layers, without the output layer.
        tokenizer_type: Megatron's argument for the family's usual vocabulary.
    """

    arguments: Mapping[str, tuple[object, ...]]
    first: tuple[MegatronPart, ...]
    block: tuple[MegatronPart, ...]
    last: tuple[MegatronPart, ...]
    tokenizer_type: str | None = None


def norm_parts(module: str, stored: str, *kinds: str) -> tuple[MegatronPart, ...]:
    """Return a norm's parameters before a linear layer, under the fused pair's names.

    With the local spec, whose norms are separate modules, `GPTModel` saves the same names.

    Args:
        module: Megatron's linear layer.
        stored: the norm's stored name.
        kinds: `weight`, or `weight` and `bias`.
    """
    return tuple(MegatronPart(f"{module}.layer_norm_{kind}", (f"{stored}.{kind}",)) for kind in kinds)
