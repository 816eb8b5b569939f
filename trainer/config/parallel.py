"""The `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.parallel.topology import Topology


@dataclass
class ParallelSection:
    """How the state is distributed over ranks. Ranks beyond tensor and pipeline parallelism are data parallel.

    Args:
        tensor_model_parallel_size: Ranks over which each weight matrix is split.
        sequence_parallel: Split activations along the sequence between the split matrix products.
        pipeline_model_parallel_size: Ranks over which the layers are split.
        num_virtual_stages_per_pipeline_rank: Pipeline stages per pipeline rank. Above 1 they are interleaved.
        zero_stage: 0 replicates the state. 1 shards parameters and moments between iterations. 2 reduces gradients per
            micro-batch, not per iteration. 3 also frees gathered parameters after the forward pass.
        replicate: State copies, for example per host. Must divide the data-parallel rank count. Each copy is sharded by
            `zero_stage`, which must be above 0.
        invariant_ranks: Maximum number of data-parallel ranks for bitwise equal losses and checkpoints, at any ZeRO
            stage, with any pipeline. A power of two dividing an iteration's micro-batches. 0 guarantees nothing.
        invariant_tensor_ranks: The same for tensor-parallel ranks, with and without sequence parallelism. A power of
            two. Needs `invariant_ranks`.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    num_virtual_stages_per_pipeline_rank: int = 1
    zero_stage: int = 1
    replicate: int = 1
    invariant_ranks: int = 0
    invariant_tensor_ranks: int = 0

    def topology(self, world_size: int) -> Topology:
        """Return the topology for `world_size` ranks, a multiple of the model-parallel sizes."""
        pp, tp = self.pipeline_model_parallel_size, self.tensor_model_parallel_size
        vpp, replicate = self.num_virtual_stages_per_pipeline_rank, self.replicate
        return Topology(pp, world_size // (pp * tp), tp, vpp=vpp, sp=self.sequence_parallel, replicate=replicate)

    def reduces_lanes_over_ranks(self, topology: Topology) -> bool:
        """Return whether every lane is reduced over ranks, as with ZeRO stages 2 and 3 outside a pipeline."""
        return self.zero_stage >= 2 and topology.dp > 1 and topology.pp == 1


# Keys that count ranks, or stages per rank.
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "replicate",
)
# Keys that keep bits equal across topologies.
INVARIANT = ("invariant_ranks", "invariant_tensor_ranks")
