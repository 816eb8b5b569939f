"""Brings the ranks of a run together and lets them go: device, threads, store, process group. Nothing here trains."""

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

from trainer.checkpoint.commit.channel import StoreChannel, single_rank_channel
from trainer.errors import LaunchError
from trainer.launch.environment import Environment
from trainer.launch.relaunch import Launch, identify
from trainer.launch.rendezvous import meet

# What ranks get to find out who is missing.
_GRACE_S = 5.0

# More threads than any host has cores; OpenMP would fail to start them.
_MOST_THREADS = 4096

# glibc's numbers of what can be set, see mallopt(3), and the largest threshold that it would come to by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks of a run, seen from one of them.

    Args:
        threads: the thread count that this process was given; bits depend on it.
        nonce: a random name of this launch, equal on all ranks.
        store_host: which process the channel depends on, in words.
        local_ranks: the ranks on this host, where torchrun told of them.
        launch: what this launch goes by; known on rank 0.
    """

    rank: int
    world_size: int
    device: torch.device
    threads: int
    channel: StoreChannel
    nonce: str
    store_host: str = "rank 0"
    local_ranks: tuple[int, ...] = ()
    launch: Launch = field(default_factory=Launch)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return every rank's values in order of rank, the same bits everywhere. A collective call; float64."""
        if self.world_size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [[float(value) for value in row] for row in torch.stack(everyone).tolist()]


def start(
    device: str, *, deterministic: bool, timeout_s: float = 600.0, variables: Mapping[str, str] = os.environ
) -> Cluster:
    """Fix threads and device, and join the other ranks. A call of all ranks.

    Args:
        timeout_s: how long a rank waits for the others, here and in every collective and message.

    Raises:
        LaunchError: if the asked device is not there or the ranks do not meet.
    """
    environment = Environment.read(variables)
    threads = thread_count(variables, environment.local_world_size)
    torch.set_num_threads(threads)
    chosen = _device(device, environment.local_rank)
    if chosen.type == "cpu":
        _keep_freed_memory()
    if deterministic:
        _make_deterministic(chosen)
    if environment.world_size == 1:
        launch = _identify_alone(environment, variables)
        return Cluster(0, 1, chosen, threads, single_rank_channel(), secrets.token_hex(4), launch=launch)
    with _bounded(environment, 2 * timeout_s + _GRACE_S):
        store, name, launch = _meet(environment, timeout_s, variables)
        channel = StoreChannel(store, environment.rank, world_size=environment.world_size, timeout_s=timeout_s)
        _form_group(environment, chosen, store=store, channel=channel, timeout_s=timeout_s)
    return Cluster(
        environment.rank,
        environment.world_size,
        chosen,
        threads,
        channel,
        name,
        environment.store_host,
        environment.local_ranks,
        launch,
    )


def thread_count(variables: Mapping[str, str] = os.environ, local_world_size: int = 1) -> int:
    """Return how many threads a rank computes with: OMP_NUM_THREADS, else its share of the cores of its host.

    torchrun sets OMP_NUM_THREADS=1 for several ranks on a host where the user has not set it, so that value counts for
    a single rank only. Of a list, one count for each level of nesting, the first counts.

    Raises:
        LaunchError: OMP_NUM_THREADS is no positive integer.
    """
    text = variables.get("OMP_NUM_THREADS", "").strip()
    first = text.partition(",")[0].strip()
    if text and not (first.isascii() and first.isdigit() and 0 < int(first) <= _MOST_THREADS):
        raise LaunchError(
            "OMP_NUM_THREADS cannot be used",
            expected=f"a number of threads from 1 to {_MOST_THREADS}",
            found=repr(text),
            fix="Correct it, or unset it for a rank's share of the cores.",
        )
    if text and (local_world_size == 1 or int(first) > 1):
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def stop(cluster: Cluster) -> None:
    """Leave together: a gloo process aborts at exit when a peer has left first. A call of all ranks."""
    part(cluster)
    leave(cluster)


def part(cluster: Cluster) -> None:
    """Wait until all ranks have nothing more to say. A call of all ranks."""
    if cluster.world_size > 1:
        dist.barrier()


def leave(cluster: Cluster) -> None:
    """Take the process group down, after `part`."""
    if cluster.world_size > 1:
        dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise LaunchError(
            "There is no CUDA device for this rank",
            where=f"local rank {local_rank}",
            expected=f"at least {local_rank + 1} devices",
            found=torch.cuda.device_count(),
            fix="Set train.device=cpu or launch fewer ranks per node.",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _keep_freed_memory() -> None:
    """Have the allocator keep what a step frees, up to 32 MiB at a time: the next step asks for the same again.

    glibc gives free memory at the end of its heap back to the system, which clears every page when it is touched again:
    4 % of a step of 40 ms. Larger tensors are mapped and unmapped as before: kept, they would leave holes that nothing
    else fits into. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, -1)


def _make_deterministic(device: torch.device) -> None:
    if device.type == "cuda":
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def _bounded(environment: Environment, seconds: float) -> Iterator[None]:
    """Leave the process if this takes longer: a stopped store host blocks every call, past any timeout."""

    def leave() -> None:
        print(
            f"rank {environment.rank} leaves: the ranks did not meet within {seconds:.0f} s, the store's host, "
            f"{environment.store_host} at {environment.address}:{environment.port}, hangs, or cannot be reached",
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


def _identify_alone(environment: Environment, variables: Mapping[str, str]) -> Launch:
    """Return what a run of one rank goes by; where torchrun's agent does not answer, that has to do without it."""
    if not environment.has_agent_store:
        return identify(variables, None)
    timeout = timedelta(seconds=_GRACE_S)
    try:
        store = TCPStore(environment.address, environment.port, None, False, timeout=timeout, wait_for_workers=False)
        return identify(variables, store)
    except (dist.DistError, RuntimeError, ValueError):
        return identify(variables, None)


def _meet(environment: Environment, timeout_s: float, variables: Mapping[str, str]) -> tuple[PrefixStore, str, Launch]:
    """Find the other ranks; return a store of our own making, the name of this meeting and what rank 0's launch is.

    torchrun's agent keeps its store over restarts, and gloo fails or hangs on the keys of a dead launch: so each
    launch has a prefix of its own.
    """
    is_host = environment.rank == 0 and not environment.has_agent_store
    try:
        server = TCPStore(
            environment.address,
            environment.port,
            environment.world_size,
            is_host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        name = meet(server, environment.rank, world_size=environment.world_size, timeout_s=timeout_s)
        launch = Launch()
        if environment.rank == 0:
            launch = identify(variables, server if environment.has_agent_store else None)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise _not_met(environment, error, []) from error
    return PrefixStore(name, server), name, launch


def _form_group(
    environment: Environment, device: torch.device, *, store: PrefixStore, channel: StoreChannel, timeout_s: float
) -> None:
    """Form the process group of ranks that have met; those who fail together find out who is missing."""
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        channel.fail(str(error))
        silent = channel.silent_ranks(_GRACE_S)
        channel.await_others(but=silent)
        raise _not_met(environment, error, silent) from error


def _not_met(environment: Environment, error: Exception, silent: Sequence[int]) -> LaunchError:
    """Return the error of ranks that did not come together, of whom the `silent` do not answer."""
    missing = f"no answer from rank {', '.join(map(str, silent))}: " if silent else ""
    return LaunchError(
        "The ranks did not meet",
        where=f"rank {environment.rank}, {environment.address}:{environment.port}",
        found=missing + str(error).splitlines()[0],
        fix=f"Look at the other ranks' logs; the store's host is {environment.store_host}.",
    )
