"""Local checkpoints of two hosts, made in one process: a thread for each, with a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprise.format import FORMAT, FRESH, LINEAGE, STATE, Branch, Lineage, StoredDtype, TensorKind, TensorSpec
from reprise.loading import Checkpoint, LoadSource, Restorer, open_checkpoint
from reprise.loading.blocks import blocks_of
from reprise.local import LocalCheckpointer
from reprise.ranks import StoreChannel
from reprise.saving import Retention, SavePolicy
from reprise.storage import Files
from reprise.tensors import Contents, torch_dtype
from tests.fakes import Axis, Sharding, all_ranks, flip_bit, save_parts, tcp_store

RUN = Lineage((Branch("a", FRESH),))

COLUMNS = Sharding("columns over 2", (Axis("column", 2),))
SPECS = [
    TensorSpec(TensorKind.MODEL, "a.weight", (50, 40), StoredDtype.F32, (50, 40)),
    TensorSpec(TensorKind.MODEL, "b.weight", (7, 6, 5), StoredDtype.BF16, (7, 6, 5)),
    TensorSpec(TensorKind.OPTIMIZER, "exp_avg.a.weight", (50, 40), StoredDtype.F32, (50, 40)),
    TensorSpec(TensorKind.OPTIMIZER, "exp_avg.empty", (0, 3), StoredDtype.F32, (0, 3)),
]


def contents(rank: int, iteration: int) -> Contents:
    """Return the share of a rank in the state of two ranks after an iteration."""
    values = {}
    for spec in SPECS:
        generator = torch.Generator().manual_seed(iteration)
        values[spec.name] = torch.randn(spec.shape, generator=generator).to(torch_dtype(spec.dtype))
    live = tuple(COLUMNS.live(rank, SPECS, values))
    state = {"format": FORMAT, "iteration": iteration, LINEAGE: RUN.record()}
    documents: dict[str, dict[str, Any] | bytes] = {STATE: state, "config.json": {"model_type": "gpt2"}}
    return Contents(tuple(SPECS), live, {}, documents)


def save_on_two_hosts(folder: Path, *iterations: int, copies: int = 0, keep: int = 9) -> list[Path]:
    """Save iterations on two hosts, and return the folder of each."""
    folders = [folder / f"host{rank}" / "local" for rank in range(2)]

    def run(channel: StoreChannel) -> None:
        policy = SavePolicy(folders[channel.rank], Retention(keep), commit_timeout_s=20.0)
        local = LocalCheckpointer(policy, channel, nonce="n", copies=copies)
        local.start()
        for iteration in iterations:
            local.save(iteration, contents(channel.rank, iteration))
            local.await_copies()
        local.close()

    all_ranks(2, run, store=tcp_store)
    return folders


def load_on_hosts(
    folders: Sequence[Path],
    *,
    shared: Path | None = None,
    ranks: Sequence[int] = (1, 1),
    lineage: Lineage | None = None,
    then: Callable[[LocalCheckpointer, int], None] = lambda *_: None,
) -> int:
    """Load on two hosts with these folders, compare all bits, and return the iteration. Each host is a thread.

    Args:
        ranks: how many each host has; they read the columns by turns.
        lineage: of the run; None to take every checkpoint as its own.
        then: called with the saver of a host, which keeps one checkpoint and a copy, and its rank.
    """

    def run(channel: StoreChannel) -> int:
        host = next(number for number, members in enumerate(of_host) if channel.rank in members)
        folder, nonce = folders[host], f"load{os.urandom(4).hex()}"
        nonce = channel.broadcast("nonce", nonce.encode()).decode()
        policy = SavePolicy(folder, Retention(1), commit_timeout_s=20.0)
        local = LocalCheckpointer(policy, channel, nonce=nonce, copies=1, local_ranks=of_host[host])
        local.start(lineage)
        live = contents(channel.rank % 2, 0).live
        source = LoadSource(folder if shared is None else shared, local=local.folders)
        restored = Restorer(channel, nonce=nonce).restore(source, check=_accept, live=lambda _: live)
        iteration = restored.checkpoint.iteration
        local.note_loaded(restored)
        then(local, channel.rank)
        local.close()
        expected = contents(channel.rank % 2, iteration).live
        for tensor, other in zip(live, expected, strict=True):
            assert torch.equal(tensor.local, other.local), tensor.spec.name
        return iteration

    of_host = [tuple(range(sum(ranks[:host]), sum(ranks[: host + 1]))) for host in range(len(ranks))]
    iterations = all_ranks(sum(ranks), run, store=tcp_store)
    assert len(set(iterations)) == 1
    return iterations[0]


def _accept(_: Checkpoint) -> None:
    """Accept every checkpoint."""


def save_shared(folder: Path, *iterations: int) -> Path:
    """Save iterations of two ranks into one folder, and return the last checkpoint."""
    for iteration in iterations:
        path = save_parts(folder, iteration, partial(contents, iteration=iteration), ranks=2, nonce="n-local")
    return path


def flip(path: Path, *, of_host: int) -> None:
    """Flip a bit of a local checkpoint, in the pieces that a host wrote."""
    checkpoint = open_checkpoint(path, Files())
    assert checkpoint.host is not None
    block = next(blocks_of(checkpoint, checkpoint.host.written_by(of_host)))
    start, _, _ = next(block.packed.spans(block.lo, block.hi))
    flip_bit(path / block.place.file, block.place.offset + start)
