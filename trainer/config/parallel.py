"""The section `parallel` with the ranges of its keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ParallelSection:
    """Distribution of the state over ranks; ranks beyond tensor and pipeline parallelism are data parallel.

    Args:
        tensor_model_parallel_size: ranks over which each weight matrix is split.
        sequence_parallel: split activations between the split products along the sequence.
        pipeline_model_parallel_size: ranks over which the layers are split.
        num_virtual_stages_per_pipeline_rank: pipeline stages per pipeline rank; above 1 they are interleaved.
        zero_stage: 0 replicates the state; 1 shards parameters and moments between iterations; 2 reduces gradients per
            micro-batch, not per iteration; 3 also frees gathered parameters after the forward pass.
        replicate: copies of the state, such as one per host; divides the data-parallel ranks. `zero_stage`, above 0,
            shards each.
        invariant_ranks: most data-parallel ranks with the same bits of losses and checkpoints, at any ZeRO stage, with
            any pipeline; a power of two that divides an iteration's micro-batches. 0 promises none.
        invariant_tensor_ranks: the same for tensor-parallel ranks, with and without sequence parallelism; a power of
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


# The keys that are a number of ranks, or of stages of one.
PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "replicate",
)
# The keys that keep bits across topologies.
INVARIANT = ("invariant_ranks", "invariant_tensor_ranks")


def parallel_problems(parallel: ParallelSection) -> list[str]:
    """Return every key of the section outside its range."""
    problems = []
    if parallel.zero_stage not in range(4):
        problems.append(f"parallel.zero_stage={parallel.zero_stage}: must be 0, 1, 2 or 3")
    for name in PARALLEL_SIZES:
        if getattr(parallel, name) < 1:
            problems.append(f"parallel.{name}={getattr(parallel, name)}: must be at least 1")
    return problems
