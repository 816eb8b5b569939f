"""A model family as plain data: stored tensors, initial values, tensor-parallel plan, limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from models.config import Initial, ModelConfig, StoredTensor
from models.hf_config import HfConfig
from models.megatron_names import MegatronNames

OUTPUT = "lm_head.weight"  # every family's output layer


class Cut(Enum):
    """How tensor parallelism treats a module.

    Between the cut projections, hidden states [B, T, width] are whole on every rank, or cut along the sequence with
    sequence parallelism; `between` below is this layout.
    """

    columns = "a projection cut by its outputs: each rank has some heads, or some of the MLP's width"
    rows = "a projection cut by its inputs; the partial products are summed into `between`"
    gather = "a module whose first input is made whole, once for all projections in it"
    embedding = "a table cut by rows; the looked-up vectors are laid out as `between`"
    whole_embedding = "a table cut by rows; the looked-up vectors are whole"
    scatter = "a module whose whole output is cut along the sequence; nothing without sequence parallelism"
    sequence_norm = "a norm of each rank's part of the sequence; nothing without sequence parallelism"
    head_norm = "a norm of each head of [B, T, heads, head width], of which each rank has some"
    output = "the projection onto the vocabulary, cut by its outputs; logits stay cut"


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """A `Cut` by module name: for the model's modules, and for modules within each block."""

    ends: Mapping[str, Cut]
    block: Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """Describes a family, apart from its network's code.

    Args:
        network: The network's module and class. Building a model imports it; checking a configuration needs no torch.
        blocks: The blocks' container. A block's tensors are named `<blocks>.<layer>.<name>`.
        embedding: The token table's stored name, which a tied output layer shares.
        first: Returns the stored tensors before the blocks.
        block: Returns a block's stored tensors, by their name within it.
        last: Returns the stored tensors after the blocks, without the output layer.
        initial: Returns a stored tensor's initial values, by its name.
        is_rotary: Whether positions rotate queries and keys.
        lora_targets: Name suffixes that select the projections adapted by default, as in PEFT.
        unused: The `ModelConfig` fields that must keep their default, and why.
        follows: The `ModelConfig` fields that must equal another field.
        needs: The optional `ModelConfig` fields required by this family.
        fan_in_fan_out: Whether projection weights are stored as [in, out] (PEFT's term).
        megatron: Megatron-LM's tensors and arguments. None if conversion refuses the family.
    """

    network: tuple[str, str]
    blocks: str
    embedding: str
    first: Callable[[ModelConfig], dict[str, StoredTensor]]
    block: Callable[[ModelConfig], dict[str, StoredTensor]]
    last: Callable[[ModelConfig], dict[str, StoredTensor]]
    initial: Callable[[str, ModelConfig], Initial]
    plan: TensorParallelPlan
    hf: HfConfig
    is_rotary: bool
    lora_targets: tuple[str, ...]
    unused: Mapping[str, str]
    follows: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    fan_in_fan_out: bool = False
    megatron: MegatronNames | None = None
