"""Saving and loading a training state against raw I/O and other ways, and training with a save of every iteration.

With `--ranks 2 --parallel zero3` or `tp2`, the ranks save and load together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from scripts.bench.harness import Figures, Goal, Side, barrier, report, seconds_of, take_turns
from scripts.bench.probe import Loop, evict, files_of, peak_memory, read_through, trim
from scripts.bench.subject import Subject, build_subject, config_of
from scripts.bench.ways import (
    AT_ONCE,
    BACKGROUND,
    COPY,
    DIRECT,
    INLINE,
    RAW,
    WAYS,
    Way,
    opened_checkpointer,
)
from trainer.launch import process_group as launch

_HELD_SIZE = "gpt2_124m"  # of the bounds; at smaller sizes the fixed cost of a save dominates
PARTS = ("ways", "training")
DURABLE, BLOCKED, COST, LOAD, DISK = "durable, s", "blocked, s", "cost to training, s", "load, s", "disk, GB"
QUIET, SAVING, ITERATION = "without saves", "with a save each", "iteration, s"
_PEAK = "peak memory, GB"
_MEASURED_SAVE = 3  # in order: the first two allocate and populate the staging memory
_BLOCK = 3  # consecutive iterations with, or without, saves
_OF_RANKS = (RAW, DIRECT, INLINE, BACKGROUND)
_MOST = {"zero3": 1.15, "tp2": 1.3}  # of an inline save of ranks over their raw write

GOALS = (
    Goal("inline save / raw write", INLINE, DURABLE, RAW, 0.85),
    Goal("load with digests / raw read", INLINE, LOAD, RAW, 0.5),
    Goal("blocked, step after the write / one copy", BACKGROUND, BLOCKED, COPY, 0.1),
    Goal("blocked, step at once / one copy", AT_ONCE, BLOCKED, COPY, 1.3),
    Goal("cost to training / raw write", BACKGROUND, COST, RAW, 0.3),
    Goal("peak memory / state", BACKGROUND, _PEAK, COPY, 1.1),
    Goal("bytes on disk / state", INLINE, DISK, COPY, 1.0005),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("--size", default=_HELD_SIZE, metavar="MODEL", help="of configs/model (%(default)s)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--rows", type=lambda text: text.split(";"), metavar="NAME;...", help="of the table of ways")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that save and load together (%(default)d)")
    parser.add_argument("--parallel", default="ddp", help="of configs/parallel, for several ranks (%(default)s)")


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the tables."""
    cluster = launch.start("cpu", deterministic=False)
    subject = build_subject(config_of(options.size, f"parallel={options.parallel}"), cluster)
    lines = [f"State: {options.size}, {subject.total_bytes / 1e9:.3f} GB in float32, {cluster.world_size} ranks."]
    if "ways" in options.only:
        sides = {name: side for name, side in _sides(subject, folder).items() if name in (options.rows or [name])}
        goals: Sequence[Goal] = GOALS
        if cluster.world_size > 1:
            name = f"inline save / raw write, {options.parallel}"
            goals = (Goal(name, INLINE, DURABLE, RAW, _MOST.get(options.parallel)),)
        if options.size != _HELD_SIZE:
            goals = [replace(goal, bound=None) for goal in goals]
        lines += ["", *report(take_turns(sides, options.rounds), RAW, goals)]
    if "training" in options.only and cluster.world_size == 1:
        rows = take_turns(training_sides(subject, folder / "training"), options.rounds)
        goal = Goal("iteration with a save each / without", SAVING, ITERATION, QUIET, 1.15)
        lines += ["", *report(rows, QUIET, [goal])]
    launch.shutdown(cluster)
    return lines


def _sides(subject: Subject, folder: Path) -> Mapping[str, Side]:
    is_alone, loop = subject.cluster.world_size == 1, Loop(width=768 if subject.total_bytes > 1e9 else 64)
    sides: Mapping[str, Side] = {
        name: partial(_measure, subject, WAYS[name], folder / "way", loop if is_alone else None)
        for name in (WAYS if is_alone else _OF_RANKS)
    }
    return {COPY: partial(_copy, subject), **sides} if is_alone else sides


def _copy(subject: Subject) -> Figures:
    """Copy the whole state between buffers that are there already."""
    sources = [tensor.local.detach().reshape(-1).numpy() for tensor in subject.tensors()]
    targets = [np.ones_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    state_gb = subject.total_bytes / 1e9
    return {BLOCKED: min(seconds_of(copy) for _ in range(3)), _PEAK: state_gb, DISK: state_gb}


def _measure(subject: Subject, way: Way, folder: Path, loop: Loop | None) -> Figures:
    """Save some times into a folder, of which the last counts, and load that save, which must be what was saved."""
    digest, is_first = subject.digest(), subject.cluster.rank == 0
    trim()
    grown, figures = peak_memory(), Figures()
    try:
        if is_first:
            folder.mkdir()
        barrier()
        with way.opened(subject, folder) as begin:
            for number in range(1, _MEASURED_SAVE + 1):
                barrier()
                if is_first:
                    for path in filter(Path.is_dir, list(folder.iterdir())):
                        shutil.rmtree(path)
                os.sync()
                figures = _save(subject, way, partial(begin, number), loop)
            figures |= {**grown(), DISK: sum(path.stat().st_size for path in files_of(folder)) / 1e9}
        barrier()
        read_through(folder)
        for name in (LOAD, LOAD, "cold load, s"):
            if way.fills:
                subject.spoil()
            if name != LOAD:
                evict(folder)
            figures[name] = seconds_of(lambda: way.load(subject, folder, _MEASURED_SAVE))
            if subject.digest() != digest:
                raise SystemExit("what was loaded is not what was saved")
    finally:
        barrier()
        subject.fill()  # a way that failed may have changed the state
        if is_first:
            shutil.rmtree(folder)
    return figures


def _save(subject: Subject, way: Way, begin: partial, loop: Loop | None) -> Figures:  # type: ignore[type-arg]
    if loop is not None:
        loop.learn()
    begun = []

    def call() -> None:
        begun.append(begin())
        if way.steps_at_once:
            with subject.hooked(begun[0].hold):
                subject.step()

    blocked_s = seconds_of(call)
    start, slowed_s = time.perf_counter(), 0.0
    if loop is not None:
        slowed_s = loop.run_until(begun[0].is_over)
    begun[0].settle()
    durable_s = blocked_s + time.perf_counter() - start
    if not way.steps_at_once:
        blocked_s += seconds_of(subject.step)
    return {DURABLE: durable_s, BLOCKED: blocked_s, COST: blocked_s + slowed_s}


def training_sides(subject: Subject, folder: Path) -> Mapping[str, Side]:
    """Return some iterations without saves, and some with a save of each."""
    iterate, numbers = subject.iteration(), itertools.count(1)

    def quiet() -> Figures:
        return {ITERATION: statistics.median(seconds_of(iterate) for _ in range(_BLOCK))}

    def saving() -> Figures:
        with opened_checkpointer(subject, folder, keep=1) as begin:
            begin(next(numbers))

            def iterate_and_save() -> None:
                iterate()
                begin(next(numbers))

            iterate_and_save()  # the staging memory is there then
            seconds = [seconds_of(iterate_and_save) for _ in range(_BLOCK)]
            begin(next(numbers)).settle()
        return {ITERATION: statistics.median(seconds)}

    return {QUIET: quiet, SAVING: saving}
