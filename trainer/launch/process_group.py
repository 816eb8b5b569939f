"""Starts and ends a run's process group: device, threads, store, and backend."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from reprise.errors import LaunchError
from reprise.ranks import StoreChannel, single_rank_channel
from trainer.launch.device import CPU, choose_device
from trainer.launch.environment import STORE_HOST, Environment
from trainer.launch.hangs import Activity
from trainer.launch.relaunch import Launch, identify
from trainer.launch.rendezvous import rendezvous
from trainer.parallel.topology import MOST_THREADS

# Time for finding out which ranks are missing.
_GRACE_S = 5.0

# Seconds that a thread writing a save holds the interpreter while training waits for it, at each return from torch; see
# sys.setswitchinterval. Python's default of 5 ms was a commit's longest pause.
SWITCH_INTERVAL_S = 0.0005

# glibc's parameter numbers, see mallopt(3), and the largest threshold it accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MMAP_THRESHOLD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Cluster:
    """A run's ranks, as seen from one rank.

    Args:
        threads: This process's thread count, which affects bits.
        nonce: This launch's random name, equal on all ranks.
        local_ranks: The ranks on this host, if torchrun started them.
        launch: This launch's identity. Known only on rank 0.
        activity: What this rank is doing.
    """

    rank: int
    world_size: int
    device: torch.device
    threads: int
    channel: StoreChannel
    nonce: str
    local_ranks: tuple[int, ...] = ()
    launch: Launch = field(default_factory=Launch)
    activity: Activity = field(default_factory=Activity, compare=False)

    def reduced(self, numbers: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sums, or maxima, over ranks of int64 numbers on the device, exact in any order. A collective call.

        The host does not wait for the device.
        """
        if self.world_size > 1:
            dist.all_reduce(numbers, operation)
        return numbers

    def counts(self, numbers: Sequence[int]) -> list[int]:
        """Sum whole numbers over ranks. A collective call, for which the host waits."""
        if self.world_size == 1:
            return list(numbers)
        totals: list[int] = self.reduced(torch.tensor(numbers, dtype=torch.int64, device=self.device)).tolist()
        return totals


def start(
    device: str,
    *,
    deterministic: bool,
    threads: int = 0,
    timeout_s: float = 600.0,
    variables: Mapping[str, str] = os.environ,
) -> Cluster:
    """Set threads and device, and join the other ranks. All ranks must call it.

    Args:
        threads: This rank's compute thread count. 0 selects the default, see `thread_count`.
        timeout_s: Seconds a rank waits for the others, here and in every collective and message.

    Raises:
        LaunchError: The requested device is missing, or a rank does not join.
    """
    environment = Environment.read(variables)
    threads = thread_count(threads, variables, environment.local_world_size)
    torch.set_num_threads(threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    chosen = choose_device(device, environment.local_rank)
    if chosen.type == CPU:
        _set_allocator({_M_MMAP_THRESHOLD: _MMAP_THRESHOLD_BYTES, _M_TRIM_THRESHOLD: -1})
    if deterministic:
        if chosen.type == "cuda":
            # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # also stops the compiler from choosing kernels by timing
    rank, world_size, local_ranks = environment.rank, environment.world_size, environment.local_ranks
    if world_size == 1:
        channel, name, launch = single_rank_channel(), secrets.token_hex(4), identify(variables, None)
    else:
        with _exit_after(environment, 2 * timeout_s + _GRACE_S):
            channel, name, launch = _join(environment, chosen, timeout_s, variables)
    return Cluster(rank, world_size, chosen, threads, channel, name, local_ranks, launch)


def thread_count(threads: int = 0, variables: Mapping[str, str] = os.environ, local_world_size: int = 1) -> int:
    """Return a rank's compute thread count: OMP_NUM_THREADS, or else its share of the host's cores.

    A configured count, `threads`, overrides both unless it is 0.

    For several ranks on a host, torchrun sets OMP_NUM_THREADS=1 unless the user has set it, so the value 1 counts only
    with a single rank. OMP_NUM_THREADS may be a list with a count per nesting level. The first count is used. Other
    values do not count, as for OpenMP.
    """
    if threads:
        return threads
    first = variables.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if first.isdecimal() and int(first) > (local_world_size > 1):
        return min(int(first), MOST_THREADS)
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def shutdown(cluster: Cluster) -> None:
    """End the process group on all ranks together: a gloo process aborts at exit if a peer exits first. Collective."""
    final_barrier(cluster)
    destroy(cluster)


def final_barrier(cluster: Cluster) -> None:
    """Wait until all ranks have sent their last message. Collective."""
    if cluster.world_size > 1:
        dist.barrier()


def destroy(cluster: Cluster) -> None:
    """Destroy the process group, after `final_barrier`."""
    if cluster.world_size > 1:
        dist.destroy_process_group()


def keep_freed_memory(device: torch.device) -> None:
    """Make the CPU allocator keep freed blocks of any size, because every iteration allocates the same sizes again.

    From the start of the process, blocks up to 32 MiB are kept, and glibc returns larger ones to the system, so blocks
    from loading and building are gone before the first iteration. The system would clear each returned page on its next
    use: 4 % of a 40 ms step, and a tenth of a GPT-2 124M iteration. Keeping its blocks raises the latter's peak memory
    by 6 %. Other C libraries keep their settings.
    """
    if device.type == CPU:
        _set_allocator({_M_MMAP_MAX: 0})


def _set_allocator(parameters: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)


@contextmanager
def _exit_after(environment: Environment, seconds: float) -> Iterator[None]:
    """Exit the process if the block takes longer: a stopped store host blocks every call, past any timeout."""

    def leave() -> None:
        print(
            f"rank {environment.rank} exits: the ranks did not join within {seconds:.0f} s; the store's host, "
            f"{STORE_HOST} at {environment.address}:{environment.port}, is hung or cannot be reached",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join(
    environment: Environment, device: torch.device, timeout_s: float, variables: Mapping[str, str]
) -> tuple[StoreChannel, str, Launch]:
    """Join the other ranks in a process group. Return a channel, the rendezvous name, and rank 0's launch.

    torchrun's agent keeps its store over restarts, and gloo fails or hangs on a dead launch's keys, so each launch has
    its own prefix.
    """
    rank, world_size, address, port = environment.rank, environment.world_size, environment.address, environment.port
    is_host = rank == 0 and not environment.has_agent_store
    timeout, launch = timedelta(seconds=timeout_s), Launch()
    try:
        server = TCPStore(address, port, world_size, is_host, timeout=timeout, wait_for_workers=False)
        name = rendezvous(server, rank, world_size=world_size, timeout_s=timeout_s)
        if rank == 0:
            launch = identify(variables, server if environment.has_agent_store else None)
        store = PrefixStore(name, server)
        channel = StoreChannel(store, rank, world_size=world_size, timeout_s=timeout_s)
        try:
            dist.init_process_group(
                dist.get_default_backend_for_device(device),  # gloo for a CPU, nccl for CUDA and ROCm, xccl for XPU
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=None if device.type == CPU else device,
            )
        except (dist.DistError, RuntimeError) as error:  # all ranks that are not lost fail at about the same time
            channel.fail(str(error).splitlines()[0])
            if silent := channel.silent_ranks(_GRACE_S):
                raise LaunchError(
                    f"Rank {', '.join(map(str, silent))} did not join: it was killed or is hung",
                    fix="Check that rank's log and host.",
                ) from error
            raise
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            "The ranks did not all join",
            where=f"rank {rank}, {address}:{port}",
            found=str(error).splitlines()[0],
            fix=f"Read the logs of the other ranks; the store's host is {STORE_HOST}.",
        ) from error
    return channel, name, launch
