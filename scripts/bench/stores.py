"""Copies into an object store and loads from it, beside bare requests of obstore and, on S3, DCP through fsspec.

The state is a model of linear layers with AdamW's moments. All sides use one store, a folder of which is emptied, and
take turns, each in a process of its own: obstore may not live in a process that forks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import reprise
from scripts.bench.harness import Figures, Goal, apart, report, take_turns
from scripts.bench.probe import files_of, peak_memory

BARE_UPLOAD, UPLOAD, DCP_SAVE = "bare upload", "copy", "DCP save, fsspec"
BARE_DOWNLOAD, LOAD, DCP_LOAD = "bare download", "load", "DCP load, fsspec"
_BASE = {UPLOAD: BARE_UPLOAD, DCP_SAVE: BARE_UPLOAD, LOAD: BARE_DOWNLOAD, DCP_LOAD: BARE_DOWNLOAD}
_SECONDS = "seconds"
_WIDTH = 1024
_BYTES_OF_LAYER = 3 * 4 * (_WIDTH * _WIDTH + _WIDTH)  # the weights and two moments in float32
_RANGE_BYTES, _THREADS = 4 << 20, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("url", help="a folder of a store, which is emptied")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state (%(default)d)")


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the table."""
    layers = max(1, round(options.megabytes * 1e6 / _BYTES_OF_LAYER))
    names = [BARE_UPLOAD, UPLOAD, BARE_DOWNLOAD, LOAD]
    if importlib.util.find_spec("s3fs") is not None and options.url.startswith("s3://"):
        names += [DCP_SAVE, DCP_LOAD]
    path = reprise.save(folder / "run", *_state(layers), iteration=1)
    with ExitStack() as stack:
        sides = {name: stack.enter_context(apart(_build, name, path, options.url, layers)) for name in names}
        rows = take_turns(sides, options.rounds, warm_up=1)  # whose uploads the downloads of each round find
        stack.enter_context(apart(_build, "", path, options.url, layers))()
    goals = [Goal(f"{name} / {_BASE[name]}", name, _SECONDS, _BASE[name]) for name in names if name in _BASE]
    size = sum(file.stat().st_size for file in files_of(path))
    return [f"{options.url}: {size / 1e6:.0f} MB", "", *report(rows, goals=goals)]


def _state(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def _build(side: str, path: Path, url: str, layers: int) -> Callable[[], Figures]:
    """Return the measurement of a side, or the deletion of all objects."""
    obstore = importlib.import_module("obstore")
    store, files, (model, optimizer) = obstore.store.from_url(url), files_of(path), _state(layers)
    state = {f"{number}": tensor for number, tensor in enumerate(model.state_dict().values())}
    state |= {f"{n}/{key}": t for n, row in optimizer.state_dict()["state"].items() for key, t in row.items()}

    def empty(folder: str = "") -> None:
        for objects in obstore.list(store, folder or None):
            obstore.delete(store, [item["path"] for item in objects])

    def bare_download() -> None:
        ranges = [
            (f"bare/{file.name}", at, min(file.stat().st_size, at + _RANGE_BYTES))
            for file in files
            for at in range(0, file.stat().st_size, _RANGE_BYTES)
        ]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda part: obstore.get_range(store, part[0], start=part[1], end=part[2]), ranges))

    def dcp_save() -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(f"{url}/dcp", thread_count=_THREADS, sync_files=False)
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)

    def dcp_load() -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        state_dict_loader.load(state, storage_reader=FsspecReader(f"{url}/dcp"), no_dist=True)

    calls: Mapping[str, Callable[[], object]] = {
        "": empty,
        BARE_UPLOAD: lambda: [obstore.put(store, f"bare/{file.name}", file) for file in files],
        UPLOAD: lambda: reprise.copy(path, f"{url}/run"),
        BARE_DOWNLOAD: bare_download,
        LOAD: lambda: reprise.load(f"{url}/run", model, optimizer),
        DCP_SAVE: dcp_save,
        DCP_LOAD: dcp_load,
    }

    def call() -> Figures:
        if side == UPLOAD:
            empty("run")  # a checkpoint that is there is not copied again
        grown, start = peak_memory(), time.perf_counter()
        calls[side]()
        return {_SECONDS: time.perf_counter() - start, **grown()}

    return call
