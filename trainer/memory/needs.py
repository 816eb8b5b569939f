"""A closed-form lower bound on a run's memory, to refuse too large a model before building it."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

from models.adapters import saved_tensors
from models.families import parameter_count
from reprise.errors import ConfigError, OutOfMemoryError, TrainerError, count_of
from reprise.storage import exists
from trainer.config.derived import batch_schedule_of, topology_of
from trainer.config.frozen import frozen_names
from trainer.config.schema import Config
from trainer.optim.table import state_tensors
from trainer.parallel.topology import ACCELERATORS

_GIB = 1 << 30
_FLOAT_BYTES = 4  # per weight or gradient
_TOKEN_BYTES = 8
_GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # CUDA and ROCm


def least_bytes(config: Config, world_size: int) -> int:
    """Return a lower bound on a rank's average bytes at an iteration's end, with `world_size` ranks.

    It counts weights, the trained weights' gradients and moments, and an iteration's tokens, but no activations, and
    nothing that a GPU run has in host memory.
    """
    topology, train = topology_of(config, world_size), config.train
    copies = topology.dp if config.parallel.zero_stage == 0 else topology.replicate
    padded = replace(config.model, vocab_size=config.model.padded_vocab_size)
    frozen = frozen_names(padded, train.freeze)
    state = state_tensors(config.optimizer, padded, frozen, averages=train.ema_decay > 0)
    moments = sum(tensor.dtype.itemsize * prod(tensor.stored.shape) for tensor in state if tensor.stored.shape)
    gradients = sum(prod(tensor.shape) for name, tensor in saved_tensors(padded).items() if name not in frozen)
    weights = parameter_count(padded) + (gradients if padded.is_adapted else 0)
    samples = max(batch_schedule_of(train).sizes) // topology.dp
    state_bytes = (_FLOAT_BYTES * (weights + gradients) + moments) * copies // world_size
    return state_bytes + _TOKEN_BYTES * samples * (train.seq_length + 1)


def host_bytes(meminfo: str, cgroup_limit: str = "max") -> int | None:
    """Return a host's memory and swap in bytes. None if the kernel does not report them.

    Args:
        meminfo: The text in `/proc/meminfo`.
        cgroup_limit: The text in the control group's `memory.max`.
    """
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", meminfo, re.MULTILINE)}
    memory = sizes.get("MemTotal")
    if memory is None:
        return None
    if cgroup_limit.strip().isdigit():
        memory = min(memory, int(cgroup_limit))
    return memory + sizes.get("SwapTotal", 0)


def require_host_memory(config: Config, world_size: int, local_world_size: int) -> None:
    """Refuse a CPU run whose state cannot fit into this host's memory and swap.

    Raises:
        ConfigError: It does not fit. The message names both sizes.
    """
    device = config.train.device
    if device in ACCELERATORS or (device == "auto" and any(exists(node) for node in _GPU_NODES)):
        return
    available = host_bytes(_text(Path("/proc/meminfo")), _text(Path("/sys/fs/cgroup/memory.max")))
    if available is not None:
        require_memory(config, world_size, ranks=local_world_size, available_bytes=available, where="this host")


def require_memory(config: Config, world_size: int, *, ranks: int, available_bytes: int, where: str) -> None:
    """Refuse a run whose state cannot fit if `ranks` ranks share `available_bytes`.

    Args:
        where: The place to name in the error.

    Raises:
        ConfigError: It does not fit. The message names both sizes.
    """
    samples = max(batch_schedule_of(config.train).sizes)
    needed = ranks * least_bytes(config, world_size)
    if needed > available_bytes:
        raise ConfigError(
            f"The run does not fit into the memory of {where}",
            where=f"{ranks} of {count_of(world_size, 'rank')}",
            expected=f"at most {available_bytes / _GIB:.1f} GiB",
            found=f"at least {needed / _GIB:.1f} GiB for {parameter_count(config.model):,} parameters, their gradients "
            f"and moments, and {count_of(samples, 'sample', form=',')} of {config.train.seq_length:,} tokens",
            fix="Choose a smaller model or batch, or more hosts; train.dry_run=true shows the memory of every rank.",
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


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
