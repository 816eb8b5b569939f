"""The cost of saving to real training, and the memory growth over many saves."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from reprise.channel import single_rank_channel
from reprise.layout import TensorKind
from reprise.savers import Checkpointer, Retention, SavePolicy
from scripts.bench.probe import resident_bytes
from scripts.bench.subject import SAMPLES, SEQ_LENGTH, Subject
from scripts.bench.ways import proven
from trainer.training.step import train_step

_BLOCK = 3  # consecutive iterations with, or without, saves


@dataclass(frozen=True, slots=True)
class Trained:
    """Seconds of an iteration without and with a save of each, and the median over rounds of their ratio."""

    quiet_s: float
    saving_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of an iteration; each micro batch has `samples` of `seq_length` tokens."""

    micro_batches: int = 1
    samples: int = SAMPLES
    seq_length: int = SEQ_LENGTH

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.samples * self.seq_length


def train_with_saves(
    subject: Subject, checkpointer: Checkpointer, *, rounds: int, first: int = 0, batch: Batch | None = None
) -> Trained:
    """Train in turn without saving and with a save of every iteration, by a checkpointer that is started.

    Args:
        first: the iteration of the first save.
    """
    batch = batch or Batch()
    _begin(subject)
    checkpointer.save(first, subject.contents(first))  # allocates the staging memory
    _iterate(subject, batch)
    checkpointer.wait()
    quiet, saving, iteration = [], [], first
    for _ in range(rounds):
        quiet.append(statistics.median(_iterate(subject, batch) for _ in range(_BLOCK)))
        iteration += 1
        checkpointer.save(iteration, subject.contents(iteration))
        times = []
        for _ in range(_BLOCK):
            iteration += 1
            start = time.perf_counter()
            _iterate(subject, batch)
            checkpointer.save(iteration, subject.contents(iteration))
            times.append(time.perf_counter() - start)
        saving.append(statistics.median(times))
        checkpointer.wait()
    for report in checkpointer.reports():
        proven(report)
    ratio = statistics.median(s / q for s, q in zip(saving, quiet, strict=True))
    return Trained(statistics.median(quiet), statistics.median(saving), ratio)


@dataclass(frozen=True, slots=True)
class BackToBack:
    """Medians over back-to-back saves, without the first."""

    blocked_s: float
    waited_s: float
    seconds: float


def save_back_to_back(subject: Subject, folder: Path, *, saves: int) -> BackToBack:
    """Save after every step of an iteration that takes no time."""
    checkpointer = _checkpointer(folder)
    for iteration in range(1, saves + 2):
        checkpointer.save(iteration, subject.contents(iteration))
        subject.step()
    checkpointer.wait()
    reports = [proven(report) for report in checkpointer.reports()][1:]
    checkpointer.close()
    shutil.rmtree(folder)
    return BackToBack(
        statistics.median(report.blocked_s for report in reports),
        statistics.median(report.waited_s for report in reports),
        statistics.median(report.seconds for report in reports),
    )


def growth_over_saves(subject: Subject, folder: Path, *, saves: int) -> int:
    """Return the growth of this process in bytes from the second save to the last."""
    checkpointer = _checkpointer(folder)
    after_second = 0
    for iteration in range(1, saves + 1):
        checkpointer.save(iteration, subject.contents(iteration))
        subject.step()
        checkpointer.wait()
        proven(checkpointer.reports()[-1])
        if iteration == 2:
            after_second = resident_bytes()
    grown = resident_bytes() - after_second
    checkpointer.close()
    shutil.rmtree(folder)
    return grown


def train_with_saves_into(subject: Subject, folder: Path, *, rounds: int) -> Trained:
    """Measure `train_with_saves` into a folder, which is removed."""
    checkpointer = _checkpointer(folder)
    trained = train_with_saves(subject, checkpointer, rounds=rounds)
    checkpointer.close()
    shutil.rmtree(folder)
    return trained


def _checkpointer(folder: Path) -> Checkpointer:
    policy = SavePolicy(folder, retention=Retention(1), async_save=True)
    checkpointer = Checkpointer(policy, single_rank_channel(), nonce="bench")
    checkpointer.start()
    return checkpointer


def _begin(subject: Subject) -> None:
    """Set initial values for training, since noise in the moments would lead to NaN."""
    for tensor in subject.tensors():
        if tensor.spec.kind is TensorKind.MODEL:
            tensor.local.detach().normal_(0.0, 0.02)
        else:
            tensor.local.detach().zero_()


def _iterate(subject: Subject, batch: Batch) -> float:
    """Run an iteration on random samples; return its seconds."""
    shape = (batch.samples, batch.seq_length + 1)
    samples = [torch.randint(0, subject.config.model.vocab_size, shape) for _ in range(batch.micro_batches)]
    keys = list(range(1, batch.micro_batches + 1))
    start = time.perf_counter()
    train_step(
        subject.state, samples, keys=keys, lr=1e-4, clip_grad=1.0, context=subject.context, cluster=subject.cluster
    )
    return time.perf_counter() - start
