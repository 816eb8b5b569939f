"""What describes a model family as plain data: tensors on disk, initial values, tensor-parallel plan, limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from models.config import Initial, ModelConfig, StoredTensor
from models.hf_config import HfConfig
from models.megatron_names import MegatronNames

OUTPUT = "lm_head.weight"  # the output layer of every family


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
    """A `Cut` by module name: of modules of the model, and of modules within each block."""

    ends: Mapping[str, Cut]
    block: Mapping[str, Cut]


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """The description of a family, apart from the code of its network.

    Args:
        network: the module and the class of the network; imported when a model is built: a configuration is checked
            without torch.
        blocks: the name of the blocks' container; tensors of a block are `<blocks>.<layer>.<name>`.
        embedding: the stored name of the token table, which a tied output layer shares.
        first: the stored tensors in front of the blocks.
        block: the stored tensors of a block, by their name within it.
        last: the stored tensors behind the blocks, without the output layer.
        initial: the initial values of a stored tensor, by its name.
        is_rotary: whether positions are rotations of queries and keys.
        lora_targets: the ends of the names of the projections with a low-rank adapter by default, as in PEFT.
        unused: the fields of `ModelConfig` that must keep their default, and why; so must fields added later and not
            named in `hf`.
        follows: the fields of `ModelConfig` that must equal another field.
        needs: the fields of `ModelConfig` that may be None, but not here.
        fan_in_fan_out: whether the weights of projections are stored as [in, out], PEFT's word for it.
        megatron: tensors and arguments in Megatron-LM; None if a conversion refuses the family.
        scaled_preset: a preset of the group `model` with a scaled RoPE, for a family that has one.
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
    scaled_preset: str | None = None
