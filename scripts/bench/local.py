"""Measure local checkpoints: `python -m scripts.bench.local [SIZE] [--rounds N] [--local FOLDER] [--shared FOLDER]`.

One rank trains with a local save after every iteration, in turn with no saves, and loads the local checkpoint, in turn
with the same state from a shared folder that the page cache holds. Then two ranks, each with a local folder of its own
as two hosts have, save and copy: the bytes that they send, and those that lie on each host.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from reprise.channel import single_rank_channel
from reprise.files import Files
from reprise.reading import LoadSource
from reprise.savers import Checkpointer, LocalCheckpointer, LocalPolicy, Restorer, SavePolicy
from scripts.bench.machine import describe
from scripts.bench.subject import PARALLEL, SIZES, Subject, build_subject
from scripts.bench.training import Batch, train_with_saves
from scripts.bench.ways import proven
from scripts.faults.ranks import run_ranks
from trainer.commands.arguments import existing_folder
from trainer.compare.text_table import format_table
from trainer.launch import process_group as launch

RANKS = 2
KEEP = 2
_TIMEOUT_S = 600.0

Row = tuple[str, str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.local", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("size", nargs="?", choices=SIZES, default="gpt2_124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local", type=existing_folder, default=Path("/dev/shm"), help="the parent of local folders")
    parser.add_argument(
        "--shared", type=existing_folder, default=Path(tempfile.gettempdir()), help="that of the shared folder"
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of is not None:
        _run_rank(options.rank_of, options.size)
        return
    with (
        tempfile.TemporaryDirectory(dir=options.local) as local,
        tempfile.TemporaryDirectory(dir=options.shared) as shared,
    ):
        print("\n".join([*describe(Path(local)), *describe(Path(shared))[-2:-1], f"state: {options.size}"]), flush=True)
        rows = [
            *_alone(options.size, Path(local), Path(shared), options.rounds),
            *_two_hosts(options.size, Path(local)),
        ]
        print("\n".join(format_table([("figure", "ratio", "values"), *rows])))


def _alone(size: str, local: Path, shared: Path, rounds: int) -> list[Row]:
    cluster = launch.start("cpu", deterministic=False)
    subject = build_subject(SIZES[size], PARALLEL["one rank"], cluster)
    saver = _local(local / "one", nonce="bench")
    saver.start()
    rows, first = [], 0
    for batch in (Batch(), Batch(micro_batches=4, samples=1, seq_length=subject.config.model.max_position_embeddings)):
        trained = train_with_saves(subject, saver.saver, rounds=rounds, first=first, batch=batch)
        name = f"iteration of {batch.tokens} tokens with a local save / without"
        rows.append(_row(name, trained.ratio, f"{trained.saving_s:.3f} s, {trained.quiet_s:.3f} s"))
        first += 1000
    saver.close()
    loads = _loads(subject, local / "one", shared / "run", rounds)
    ratio = statistics.median(a / b for a, b in loads)
    seconds = ", ".join(f"{statistics.median(times):.3f} s" for times in zip(*loads, strict=True))
    return [*rows, _row("load, local / shared", ratio, seconds)]


def _loads(subject: Subject, local: Path, shared: Path, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of loads from the local and from the shared folder, in turn, without the first round."""
    checkpointer = Checkpointer(SavePolicy(shared), single_rank_channel(), nonce="shared")
    checkpointer.start()
    report = checkpointer.save(1, subject.contents(1))
    assert report is not None
    proven(report)
    checkpointer.close()
    pairs = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        saver = _local(local, nonce=f"local{number}")
        saver.start()
        restorer = Restorer(single_rank_channel(), nonce=f"local{number}", local=saver.folders)
        restorer.restore(
            LoadSource(local),
            check=lambda _: None,
            live=lambda _: list(subject.tensors()),
            with_local=True,
            is_new=True,
        )
        local_s = time.perf_counter() - start
        saver.close()
        start = time.perf_counter()
        checkpointer = Checkpointer(SavePolicy(shared), single_rank_channel(), nonce=f"shared{number}")
        checkpointer.start()
        restorer = Restorer(single_rank_channel(), nonce=f"shared{number}")
        restorer.restore(LoadSource(shared), check=lambda _: None, live=lambda _: list(subject.tensors()), is_new=True)
        pairs.append((local_s, time.perf_counter() - start))
        checkpointer.close()
    return pairs[1:]


def _two_hosts(size: str, local: Path) -> list[Row]:
    """Start two ranks, each with a folder of its own, and return what they measured."""
    command = [sys.executable, "-m", "scripts.bench.local", size, "--rank-of", str(local)]
    run_ranks(command, RANKS, timeout_s=_TIMEOUT_S, hosts=RANKS)
    reports = [json.loads((local / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    state_bytes, sent_bytes = reports[0]["state_bytes"], sum(row["sent_bytes"] for row in reports)
    expected = state_bytes / RANKS * 2 * (KEEP + 1)
    worst = max(row["folder_bytes"] for row in reports)
    return [
        _row("bytes sent by a copy / bytes of the state", sent_bytes / state_bytes, f"{sent_bytes / 1e6:.1f} MB"),
        _row(f"bytes on a host / share * 2 * {KEEP + 1}", worst / expected, f"{worst / 1e6:.1f} MB"),
        _row("seconds from a local save to its copy", None, f"{max(row['copied_s'] for row in reports):.2f} s"),
    ]


def _run_rank(parent: Path, size: str) -> None:
    """Save more than KEEP local checkpoints as one of two hosts, copy each, and write what was measured."""
    cluster = launch.start("cpu", deterministic=False, threads=1)
    subject = build_subject(SIZES[size], PARALLEL["zero3"], cluster)
    folder = parent / f"host{cluster.rank}"
    policy = LocalPolicy(folder, 1, KEEP, 1, SavePolicy(folder, async_save=True))
    saver = LocalCheckpointer(policy, cluster.channel, nonce=cluster.nonce)
    saver.start()
    sent_bytes, seconds = list[int](), 0.0
    for iteration in range(1, KEEP + 3):  # the last two overwrite files of a checkpoint that retention gave up
        before = saver.sent_bytes
        saver.saver.save(iteration, subject.contents(iteration))
        saver.saver.wait()
        start = time.perf_counter()
        saver.await_copies()
        seconds = time.perf_counter() - start
        sent_bytes.append(saver.sent_bytes - before)
        dist.barrier()  # both are through before the next save is decided on
    for report in saver.saver.reports():
        proven(report)
    measured = {
        "state_bytes": subject.total_bytes,
        "sent_bytes": sent_bytes[-1],
        "folder_bytes": Files().allocated_bytes(folder),
        "copied_s": seconds,
    }
    (parent / f"rank{cluster.rank}.json").write_text(json.dumps(measured))
    saver.close()
    shutil.rmtree(folder)
    launch.shutdown(cluster)


def _local(folder: Path, *, nonce: str) -> LocalCheckpointer:
    policy = LocalPolicy(folder, 1, KEEP, 1, SavePolicy(folder, async_save=True))
    return LocalCheckpointer(policy, single_rank_channel(), nonce=nonce)


def _row(name: str, ratio: float | None, figures: str) -> Row:
    return name, "" if ratio is None else f"{ratio:.4f}", figures


if __name__ == "__main__":
    main()
