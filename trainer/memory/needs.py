"""A lower bound on a run's memory, which refuses too large a model before it has memory, and failed allocations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from models.families import parameter_count
from reprise.errors import ConfigError, OutOfMemoryError, TrainerError, count_of
from reprise.tensors import local_of
from trainer.config.schema import Config
from trainer.launch.device import CPU, memory_bytes
from trainer.launch.process_group import Cluster
from trainer.optim.table import MOMENTS

_GIB = 1 << 30


def require_memory(models: Sequence[nn.Module], config: Config, cluster: Cluster) -> None:
    """Refuse a run whose state cannot fit into this rank's device, or into the host if its ranks share its memory.

    Args:
        models: This rank's stages, before they have memory. Counted are weights, the trained weights' gradients, and a
            single moment each.

    Raises:
        ConfigError: They do not fit. The message names both sizes.
    """
    ranks, place = (len(cluster.local_ranks), "the host") if cluster.device.type == CPU else (1, str(cluster.device))
    parameters = [parameter for model in models for parameter in model.parameters()]
    trained = sum(local_of(parameter).numel() for parameter in parameters if parameter.requires_grad)
    gradient_and_moment = 4 + MOMENTS[config.optimizer.moments_dtype].itemsize
    state_bytes = sum(local_of(parameter).nbytes for parameter in parameters) + trained * gradient_and_moment
    needed, available_bytes = ranks * state_bytes, memory_bytes(cluster.device)
    if needed > available_bytes:
        raise ConfigError(
            f"The run does not fit into the memory of {place}",
            where=f"{ranks} of {count_of(cluster.world_size, 'rank')}",
            expected=f"at most {available_bytes / _GIB:.1f} GiB",
            found=f"at least {needed / _GIB:.1f} GiB for {parameter_count(config.model):,} parameters, their gradients "
            "and moments",
            fix="Choose a smaller model, or more hosts; train.dry_run=true shows the memory of every rank.",
        )


def out_of_memory(error: BaseException, config: Config, *, where: str) -> OutOfMemoryError | None:
    """Return the error to raise for a failed allocation on a host or a device. None for any other error.

    Args:
        where: The rank and its device.
    """
    text = str(error)
    is_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in text
    if isinstance(error, TrainerError) or not (is_host or type(error).__name__ == "OutOfMemoryError"):  # torch's
        return None
    train = config.train
    less = [f"train.micro_batch_size={train.micro_batch_size}", f"train.seq_length={train.seq_length}"]
    recompute = "" if train.activation_checkpointing else ", set train.activation_checkpointing=true"
    reason = text[max(0, text.find("DefaultCPUAllocator")) :].partition("\n")[0]
    return OutOfMemoryError(
        f"The {'host' if is_host else 'device'} has no memory left for this run",
        where=where,
        found=reason or type(error).__name__,
        fix=f"Lower {' or '.join(less)}{recompute}, or use more ranks. train.dry_run=true shows the memory of every "
        "rank. Committed checkpoints are untouched.",
    )
