"""Sides of `scripts.bench.stores` that load obstore, each in a process of its own, without its start."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from reprise.format.manifest import BLOCK_BYTES
from reprise.format.mirror_record import MIRROR, MirrorRule
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.url import StoreUrl
from reprise.stores.wire import CONNECTIONS

_DCP_THREADS = 8
SIDE_FOLDERS = ("bare", "run", "dcp")
Seconds = dict[str, float]  # `seconds`, and `bytes`: the peak memory of the process, or of what a side counts


def bare_upload(path: Path, url: StoreUrl, client: StoreClient) -> None:
    """Send the files one after the other."""
    for file in _files(path):
        client.put_file(url.child(f"bare/{file.relative_to(path)}").key, file)


def bare_download(path: Path, url: StoreUrl, client: StoreClient) -> None:
    """Read the files in ranges."""
    ranges = [
        (url.child(f"bare/{file.relative_to(path)}").key, start, min(BLOCK_BYTES, file.stat().st_size - start))
        for file in _files(path)
        for start in range(0, file.stat().st_size, BLOCK_BYTES)
    ]
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        for _ in threads.map(lambda part: client.read(*part).nbytes, ranges):
            pass


def mirror(path: Path, url: StoreUrl, client: StoreClient) -> None:
    """Upload the run's folder as a mirror does."""
    (path.parent / MIRROR).unlink(missing_ok=True)
    run = url.child("run")
    passes = MirrorPass(client, run, path.parent, MirrorRule(str(run)))
    while not passes.run(at_end=True):
        pass


def dcp_save(path: Path, url: StoreUrl, _: StoreClient) -> float:
    """Save the tensors of the files with torch.distributed.checkpoint through fsspec; return the seconds."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = _tensors(path)
    writer = FsspecWriter(str(url.child("dcp")), thread_count=_DCP_THREADS, sync_files=False)
    start = time.perf_counter()
    save(state, storage_writer=writer, no_dist=True)
    return time.perf_counter() - start


def dcp_load(path: Path, url: StoreUrl, _: StoreClient) -> float:
    """Load these tensors again in place; return the seconds."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = _tensors(path)
    start = time.perf_counter()
    load(state, storage_reader=FsspecReader(str(url.child("dcp"))), no_dist=True)
    return time.perf_counter() - start


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    tables = [load_file(file) for file in _files(path) if file.suffix == ".safetensors"]
    return {f"{number}/{name}": tensor for number, table in enumerate(tables) for name, tensor in table.items()}


def idle(*_: object) -> None:
    """Do nothing: the memory of a process with obstore."""


def clear(_: Path, url: StoreUrl, client: StoreClient) -> None:
    """Delete the objects of the sides, not the saves beside which a mirror uploads."""
    for side in SIDE_FOLDERS:
        empty(_, url.child(side), client)


def empty(_: Path, url: StoreUrl, client: StoreClient) -> None:
    """Delete all objects."""
    client.delete([entry.key for entry in client.objects(url.key)])


def stored(_: Path, url: StoreUrl, client: StoreClient) -> int:
    """Return the bytes of the objects of the run."""
    return sum(entry.size for entry in client.objects(url.child("run").key))


def peak_bytes() -> int:
    """Return the peak memory of this process since its program began; `getrusage` counts that of its parent too."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


SIDES: dict[str, Callable[[Path, StoreUrl, StoreClient], float | None]] = {
    call.__name__: call for call in (bare_upload, bare_download, mirror, dcp_save, dcp_load, idle, clear, empty, stored)
}
TIMED = (dcp_save, dcp_load)  # return their seconds


def main(side: str, path: str, text: str) -> None:
    """Run a side, and print its seconds and bytes as JSON."""
    url = StoreUrl.parse(text)
    client = StoreClient(url.root)
    client.names(url.key)
    start = time.perf_counter()
    result = SIDES[side](Path(path), url, client)
    seconds = time.perf_counter() - start
    if SIDES[side] in TIMED:
        seconds, result = result or 0.0, None
    print(json.dumps({"seconds": seconds, "bytes": peak_bytes() if result is None else result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
