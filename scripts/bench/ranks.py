"""Two ranks that save and load, in turn with raw I/O: `python -m scripts.bench.ranks`, once per rank.

The ranks have torchrun's environment variables. Rank 0 writes the measurements to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from reprise.commit.replicas import ReplicaDigests
from reprise.live_tensors import Contents
from reprise.reading import LoadSource
from reprise.savers import Checkpointer, Restorer, SavePolicy
from scripts.bench.probe import fill_from, read_through, seconds_of, sync_folder, touched
from scripts.bench.rounds import rotated
from scripts.bench.subject import PARALLEL, SIZES, Subject, build_subject
from scripts.bench.ways import proven
from scripts.faults import ranks
from trainer.launch import process_group as launch

RANKS = 2
TOPOLOGIES = ("zero3", "tp2", "zero0")
RAW, FIRST, INLINE, BACKGROUND, BLOCKED = "raw", "first", "inline", "background", "blocked"
READ, LOAD, REPLICAS = "read", "load", "replicas"
_TIMEOUT_S = 1800.0

Rounds = list[dict[str, float]]


def run_ranks(folder: Path, *, size: str, rounds: int) -> dict[str, Rounds]:
    """Start the ranks, wait for them, and return the seconds of every round by topology.

    Raises:
        RuntimeError: if a rank failed.
    """
    folder.mkdir(parents=True)
    output = folder / "rounds.json"
    command = [sys.executable, "-m", "scripts.bench.ranks", str(folder), "--size", size, "--rounds", str(rounds)]
    ranks.run_ranks([*command, "--output", str(output)], RANKS, timeout_s=_TIMEOUT_S)
    by_topology: dict[str, Rounds] = json.loads(output.read_text())
    shutil.rmtree(folder)
    return by_topology


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    cluster = launch.start("cpu", deterministic=False)
    by_topology: dict[str, Rounds] = {}
    for name in TOPOLOGIES:
        subject = build_subject(SIZES[options.size], PARALLEL[name], cluster)
        by_topology[name] = _Rank(subject, options.folder / name, name).run(options.rounds)
    if cluster.rank == 0:
        options.output.write_text(json.dumps(by_topology))
    launch.shutdown(cluster)


class _Rank:
    """A rank's part of every round; all ranks make the same calls."""

    def __init__(self, subject: Subject, folder: Path, name: str) -> None:
        self._subject, self._folder, self._name = subject, folder, name
        self._rank = subject.cluster.rank
        self._share = touched(subject.total_bytes // RANKS)

    def run(self, rounds: int) -> Rounds:
        """Return the seconds of each round on the slowest rank."""
        results = []
        ways = (self._raw, self._inline, self._in_background, self._digest_replicas)
        for number in range(rounds):
            row: dict[str, float] = {}
            order = [str(index) for index in range(len(ways))]
            for index in rotated(order, number):
                for attempt in range(2):  # the second is measured: see `rounds.py`
                    self._enter()
                    ways[int(index)](row, 2 * number + attempt)
                    self._clear()
            results.append(row)
        return results

    def _raw(self, row: dict[str, float], _: int) -> None:
        row[RAW] = self._slowest(self._timed(self._write_raw))
        read_through(self._folder)
        paths = [self._folder / f"raw{self._rank}"]
        row[READ] = self._slowest(self._timed(lambda: fill_from(paths, memoryview(bytearray(self._share.nbytes)))))

    def _write_raw(self) -> None:
        with (self._folder / f"raw{self._rank}").open("wb", buffering=0) as file:
            data = self._share.data
            while data.nbytes:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def _inline(self, row: dict[str, float], number: int) -> None:
        """Save twice, because the first save allocates the shared memory for columns."""
        checkpointer = self._checkpointer(number, async_save=False)
        for iteration, name in ((1, FIRST), (2, INLINE)):
            contents = self._subject.contents(iteration)
            row[name] = self._slowest(self._timed(partial(_save, checkpointer, iteration, contents)))
        checkpointer.close()
        read_through(self._folder)
        restorer = Restorer(self._subject.cluster.channel, nonce=f"load-{self._name}-{number}")

        def load() -> None:
            live = list(self._subject.state.shards())
            restorer.restore(LoadSource(self._folder), check=lambda _: None, live=lambda _: live, is_new=True)

        digest = self._subject.digest()
        self._subject.spoil()
        row[LOAD] = self._slowest(self._timed(load))
        if self._subject.digest() != digest:
            raise ValueError("what was loaded is not what was saved")

    def _in_background(self, row: dict[str, float], number: int) -> None:
        """Save twice, because the first save allocates the staging memory; nothing computes beside the second."""
        checkpointer = self._checkpointer(number, async_save=True)
        for iteration in (1, 2):
            contents = self._subject.contents(iteration)
            dist.barrier()
            checkpointer.save(iteration, contents)
            checkpointer.wait()
            report = proven(checkpointer.reports()[-1])
        row[BACKGROUND], row[BLOCKED] = self._slowest(report.seconds), self._slowest(report.blocked_s)
        checkpointer.close()

    def _digest_replicas(self, row: dict[str, float], _: int) -> None:
        """Digest what other ranks hold too while nothing else runs."""
        live = self._subject.contents(1).live
        row[REPLICAS] = self._slowest(self._timed(lambda: ReplicaDigests(live)))

    def _checkpointer(self, number: int, *, async_save: bool) -> Checkpointer:
        nonce = f"{self._name}-{number}-{int(async_save)}"
        policy, cluster = SavePolicy(self._folder, async_save=async_save), self._subject.cluster
        checkpointer = Checkpointer(policy, cluster.channel, nonce=nonce, local_ranks=cluster.local_ranks)
        checkpointer.start()
        return checkpointer

    def _timed(self, call: Callable[[], object]) -> float:
        dist.barrier()
        return seconds_of(call)

    def _slowest(self, seconds: float) -> float:
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _enter(self) -> None:
        if self._rank == 0:
            self._folder.mkdir(parents=True)
        os.sync()
        dist.barrier()

    def _clear(self) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(self._folder)
        dist.barrier()


def _save(checkpointer: Checkpointer, iteration: int, contents: Contents) -> None:
    proven(checkpointer.save(iteration, contents))


if __name__ == "__main__":
    main()
