"""What local checkpoints send, by hosts: a save, and the choice of a candidate at a start, for `scripts.bench.scale`.

Every host is a thread with a folder and a rank of its own; all run the real saver over a real store on 127.0.0.1, and
links between hosts are real connections. Bytes are counted where other ranks read rank 0's messages in the store, which
lies on rank 0's host.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reprise.channel import StoreChannel
from reprise.folder import FORMAT, STATE
from reprise.format.box import Box
from reprise.layout import StoredDtype, TensorKind, TensorSpec
from reprise.live_tensors import Contents, LiveTensor
from reprise.savers import LocalCheckpointer, LocalPolicy, SavePolicy

_TENSORS = 64  # as eight ranks a host with eight pieces each
_ITEMS = 4
_TIMEOUT_S = 300.0
_CLONE_FS = 0x200  # linux/sched.h
_FOLDER = Path("/proc/thread-self/cwd/local")  # of a host, whose threads have a working folder of their own


class CountingChannel(StoreChannel):
    """A channel that counts the bytes that ranks other than rank 0 read."""

    read_bytes = 0
    _counting = threading.Lock()

    def _message(self, key: str, sender: str) -> tuple[bytes, int]:
        data, chunks = super()._message(key, sender)
        if not self.coordinates:
            with CountingChannel._counting:
                CountingChannel.read_bytes += len(data)
        return data, chunks


def contents(host: int, hosts: int, iteration: int) -> Contents:
    """Return the row of a host in each of a few tensors."""
    shape = (hosts, _ITEMS)
    specs = tuple(TensorSpec(TensorKind.MODEL, f"layers.{n}.w", shape, StoredDtype.F32, shape) for n in range(_TENSORS))
    box = Box((host, 0), (1, _ITEMS))
    live = tuple(LiveTensor(spec, box, torch.full((1, _ITEMS), float(host)), (host,)) for spec in specs)
    return Contents(specs, live, {}, {STATE: {"format": FORMAT, "iteration": iteration}})


def measure(hosts: int) -> Mapping[str, float]:
    """Return the bytes and seconds of the first save, of a later save, and of a start that chooses the last."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("RES_OPTIONS", "timeout:1")  # the store asks for names: a silent server would take 5 s
    CountingChannel.read_bytes = 0
    marks: list[tuple[float, int]] = []
    barrier = threading.Barrier(hosts, lambda: marks.append((time.perf_counter(), CountingChannel.read_bytes)))
    ended: list[int] = []
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:

        def run(host: int) -> None:
            try:
                channel = CountingChannel(store, host, world_size=hosts, timeout_s=_TIMEOUT_S)
                _run_host(channel, Path(folder) / str(host), barrier)
                ended.append(host)
            finally:
                if host not in ended:
                    barrier.abort()  # the others need not wait; the thread prints its error

        threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in range(hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(ended) < hosts:
        raise RuntimeError(f"{hosts - len(ended)} of {hosts} hosts failed")
    figures: dict[str, float] = {}
    for what, (before, after) in zip(STEPS, itertools.pairwise(marks), strict=True):
        if what:
            figures |= {f"{what} kB out": (after[1] - before[1]) / 1e3, f"{what} s": after[0] - before[0]}
    return figures


STEPS = ("first save", "later save", "", "candidate")


def _run_host(channel: StoreChannel, folder: Path, barrier: threading.Barrier) -> None:
    """Save twice and start again on one host, whose working folder is its own, as its disk would be."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS):
        raise OSError(ctypes.get_errno(), "a thread cannot have a working folder of its own")
    folder.mkdir()
    os.chdir(folder)
    host, hosts = channel.rank, channel.world_size
    policy = LocalPolicy(_FOLDER, 1, 9, 0, SavePolicy(None, commit_timeout_s=_TIMEOUT_S))
    local = LocalCheckpointer(policy, channel, nonce="a")
    local.start()
    for iteration in (1, 2):
        barrier.wait()
        local.saver.save(iteration, contents(host, hosts, iteration))
        local.saver.wait()
    barrier.wait()
    local.close()
    local = LocalCheckpointer(policy, channel, nonce="b")
    local.start()
    barrier.wait()
    local.folders.survey()
    local.folders.complete(
        _FOLDER / "iter_0000002",
        lambda _: None,
        lambda checkpoint: {} if checkpoint.host is None else checkpoint.host.own,
    )
    barrier.wait()
    local.close()
