"""A family's tensors and arguments in Megatron-LM as data, used in both directions. Without torch.

Sources: `megatron/core/models/gpt/gpt_model.py`, `transformer/attention.py` and `transformer/mlp.py` of megatron-core
0.16; `megatron/training/arguments.py` of Megatron-LM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

POSITIONS = "position_embedding_type"
ABSENT = (False, None)  # the values of an argument for a part that a family does not have


class MegatronForm(Enum):
    """How a tensor of Megatron's holds the stored tensors."""

    plain = "the stored tensor itself"
    transposed = "[out, in] of a stored [in, out]"
    vocabulary = "the stored table and rows of padding"
    query_groups = "stored queries, keys and values, ordered by query group"
    fused_query_groups = "the same of one stored tensor, [..., queries | keys | values]"
    gated = "the stored gate above the stored up projection"


@dataclass(frozen=True, slots=True)
class MegatronPart:
    """A tensor of a `GPTModel` and the stored tensors that it holds.

    Args:
        name: within the model; of a tensor of a block, within the layer.
        stored: transformers' names, within the block for a tensor of a block.
        cut: the dimension along which tensor parallelism cuts it; None if every rank holds all of it.
    """

    name: str
    stored: tuple[str, ...]
    form: MegatronForm = MegatronForm.plain
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class MegatronNames:
    """The arguments and tensors of a family in Megatron-LM.

    Args:
        arguments: the arguments of every model of the family, `POSITIONS` among them, with their possible values: an
            export writes the first, an import refuses all others. None also stands for a missing argument.
        first: the tensors in front of the layers.
        block: the tensors of a layer.
        last: the tensors behind the layers, without the output layer.
        tokenizer_type: the argument of this name, for the vocabulary that the family is usually trained with.
    """

    arguments: Mapping[str, tuple[object, ...]]
    first: tuple[MegatronPart, ...]
    block: tuple[MegatronPart, ...]
    last: tuple[MegatronPart, ...]
    tokenizer_type: str | None = None


def norm_parts(module: str, stored: str, *kinds: str) -> tuple[MegatronPart, ...]:
    """Return the parameters of a norm in front of a linear layer, under the names of the two fused.

    `GPTModel` of the local spec, whose norms are modules of their own, saves the same names.

    Args:
        module: Megatron's linear layer.
        stored: the norm's stored name.
        kinds: `weight`, or `weight` and `bias`.
    """
    return tuple(MegatronPart(f"{module}.layer_norm_{kind}", (f"{stored}.{kind}",)) for kind in kinds)
