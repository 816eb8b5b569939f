"""Saves while training goes on: what is committed is the iteration that was saved, whatever disk and training do."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from models.build import build_model
from reprise import load
from reprise.errors import CheckpointError
from reprise.format.layout import build_layout
from reprise.format.names import STATE
from reprise.nested.documents import document
from reprise.nested.tree import tree_of
from reprise.ranks.channel import StoreChannel, single_rank_channel
from reprise.saving import plan
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import Contents, Grid, live_tensors
from tests.crash.small_run import aliases_of
from tests.fakes import JOIN_S, FailingFiles, StuckFiles, run_ranks
from tests.messages import says
from tests.unit.model_samples import GPT2
from trainer.config.optimizer import OptimizerSection
from trainer.optim.adamw import build_adamw
from trainer.run.state import ModelPart, TrainerState, checkpoint_specs

SMALL_CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", SMALL_CHUNK)
    monkeypatch.setattr(plan, "EXTENT_BYTES", 4 * SMALL_CHUNK)


_SEEDED = threading.Lock()


class Net(nn.Module):
    """A model with what may change at other times than in a step: a counting buffer, a parameter nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(150, 300)
        self.second = nn.Linear(300, 41)
        self.frozen = nn.Parameter(torch.zeros(60, 300), requires_grad=False)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, 41] for [batch, 150]; counts its calls."""
        self.count += 1
        self.frozen.data += 1
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


class Training:
    """A model in training, whose state can be told by value."""

    def __init__(self) -> None:
        with _SEEDED:  # ranks are threads here, and share torch's generator
            torch.manual_seed(1)
            self.net = Net()
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
        self.iteration = 0
        self.step()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(4, 150, generator=torch.Generator().manual_seed(self.iteration))).square().sum().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.iteration += 1

    def contents(self, *, ranks: int = 1) -> Contents:
        live = tuple(live_tensors(self.net, self.optimizer, grid=Grid.flat(ranks)))
        state = document(tree_of(self.net, self.optimizer).section(), self.iteration)
        specs = tuple(t.spec for t in live)
        return Contents(specs, live, aliases_of(self.net), {STATE: state}, (self.optimizer,))

    def place_like_files(self) -> None:
        """Move the moments to memory that lies as the files do."""
        contents = self.contents()
        named = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        live = [(t, t.local) for t in contents.live if t.spec.name in named]
        memory = zeros_like_files(live, ("exp_avg.", "exp_avg_sq."), build_layout(contents.specs))
        assert len(memory) == 2 * len(named)
        for stored, tensor in memory.items():
            key, _, name = stored.partition(".")
            state = self.optimizer.state[named[name]]
            state[key] = tensor.copy_(state[key])

    def values(self) -> dict[str, torch.Tensor]:
        return {tensor.spec.name: tensor.local.clone() for tensor in self.contents().live}


def loaded(path: Path) -> dict[str, torch.Tensor]:
    training = Training()
    load(path, training.net, training.optimizer)
    return training.values()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def started(policy: SavePolicy, files: Files = FILE_SYSTEM, channel: StoreChannel | None = None) -> Checkpointer:
    checkpointer = Checkpointer(policy, channel or single_rank_channel(), nonce="n", files=files)
    checkpointer.start()
    return checkpointer


def only_report(checkpointer: Checkpointer) -> SaveReport:
    checkpointer.wait()
    (report,) = checkpointer.reports()
    return report


class Gate(Files):
    """A disk that takes so many writes, and the next ones when it is opened."""

    def __init__(self, writes: int, *, around_cache: bool = True) -> None:
        self._left, self._around_cache = writes, around_cache
        self._lock = threading.Lock()
        self.opened = threading.Event()
        self.is_shut = threading.Event()

    def open_direct(self, path: Path) -> int | None:
        return super().open_direct(path) if self._around_cache else None

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        with self._lock:
            self._left -= 1
            must_wait = self._left < 0
        if must_wait:
            self.is_shut.set()
            assert self.opened.wait(JOIN_S)
        super().write(descriptor, data, offset=offset)


@pytest.mark.parametrize("is_constant", [False, True])
def test_only_what_a_step_may_not_change_alone_is_copied(tmp_path: Path, is_constant: bool) -> None:
    """What is written before the step, and what nothing changes, is not copied."""
    training = Training()
    frozen, count = training.net.frozen, training.net.count
    checkpointer = started(SavePolicy(tmp_path, async_save=True))
    checkpointer.save(1, replace(training.contents(), constant=(frozen,) if is_constant else ()))
    checkpointer.wait()
    training.step()
    assert only_report(checkpointer).copied_bytes == count.nbytes + (0 if is_constant else frozen.nbytes)
    checkpointer.close()


def test_without_an_optimizer_everything_is_copied_at_once(tmp_path: Path) -> None:
    training, gate = Training(), Gate(0)
    checkpointer = started(SavePolicy(tmp_path, async_save=True), gate)
    expected = training.values()
    checkpointer.save(1, replace(training.contents(), optimizers=()))
    training.step()
    gate.opened.set()
    report = only_report(checkpointer)
    assert_same(loaded(report.path), expected)
    checkpointer.close()


def be_patient(checkpointer: Checkpointer) -> None:
    """Let the next steps wait for a disk that is only slow."""
    checkpointer._policy = replace(checkpointer._policy, stall_timeout_s=JOIN_S)


def test_the_error_of_a_save_does_not_keep_its_memory(tmp_path: Path) -> None:
    training = Training()
    checkpointer = started(SavePolicy(tmp_path, async_save=True), FailingFiles("write"))
    checkpointer.save(1, training.contents())
    assert checkpointer._started is not None
    snapshot = weakref.ref(checkpointer._started.snapshot)
    training.step()
    report = only_report(checkpointer)
    assert checkpointer.results.last_error is report.error is not None
    gc.collect()
    assert snapshot() is None
    checkpointer.close()


def test_a_save_in_doubt_does_not_keep_its_memory(tmp_path: Path) -> None:
    class Slow(Files):
        reached, opened = threading.Event(), threading.Event()

        def rename(self, source: Path, target: Path) -> None:
            if target.name == "iter_0000001":
                self.reached.set()
                assert self.opened.wait(JOIN_S)
            super().rename(source, target)

    training = Training()
    checkpointer = started(SavePolicy(tmp_path, async_save=True, commit_timeout_s=0.01), Slow())
    checkpointer.save(1, training.contents())
    assert checkpointer._started is not None
    snapshot = weakref.ref(checkpointer._started.snapshot)
    assert Slow.reached.wait(JOIN_S)
    assert "checks whether this one was committed" in str(only_report(checkpointer).error)
    Slow.opened.set()
    checkpointer.drain(JOIN_S)
    checkpointer._policy = SavePolicy(tmp_path, async_save=True)
    gc.collect()
    assert snapshot() is None
    checkpointer.save(1, training.contents())  # it is there
    assert checkpointer.reports() == []
    checkpointer.close()


def test_the_arena_stays_while_a_thread_that_hangs_may_use_it(tmp_path: Path) -> None:
    files, training = StuckFiles(), Training()
    checkpointer = started(SavePolicy(tmp_path, async_save=True, stall_timeout_s=0.1), files)
    whole = training.contents()
    checkpointer.save(1, Contents(whole.specs[:1], whole.live[:1], {}, whole.documents, whole.optimizers))
    assert files.reached.wait(JOIN_S)
    checkpointer._policy = SavePolicy(tmp_path, async_save=True, commit_timeout_s=0.01)
    arena = checkpointer._arena
    assert 0 < arena.total_bytes < sum(spec.total_bytes for spec in whole.specs)
    for iteration in (2, 3):
        checkpointer.save(iteration, whole)
        assert checkpointer._arena is arena
    assert [report.error is None for report in checkpointer.reports()] == [False] * 3
    files.released.set()
    checkpointer.drain(JOIN_S)
    checkpointer._policy = SavePolicy(tmp_path, async_save=True)
    be_patient(checkpointer)
    training.iteration = 4
    checkpointer.save(4, training.contents())
    assert checkpointer._arena.total_bytes > arena.total_bytes
    expected = training.values()
    training.step()
    assert_same(loaded(only_report(checkpointer).path), expected)
    checkpointer.close()


def keys_left(root: Path, culprit: int, failures: int) -> int:
    """Return how many keys are left by saves that the disk of one rank ended for all, and a good one."""
    store, stuck = HashStore(), StuckFiles()

    def call(channel: StoreChannel) -> list[bool]:
        training = Training()
        training.place_like_files()
        files = stuck if channel.rank == culprit else FILE_SYSTEM
        policy = SavePolicy(root, async_save=True, staging_bytes=0, stall_timeout_s=0.1, commit_timeout_s=JOIN_S)
        checkpointer = started(policy, files, channel)
        for iteration in range(failures):
            checkpointer.save(iteration, training.contents(ranks=2))
            training.step()
            checkpointer.wait()
        channel.agree("both are through", None)
        stuck.released.set()
        checkpointer.drain(JOIN_S)
        be_patient(checkpointer)
        checkpointer.save(failures, training.contents(ranks=2))
        checkpointer.close()
        return [report.error is None for report in checkpointer.reports()]

    outcomes = run_ranks(2, call, store=lambda: store)
    assert outcomes == [[False] * failures + [True]] * 2
    assert [path.name for path in root.glob("*iter_*")] == [f"iter_{failures:07d}"]
    return int(store.num_keys())


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stalled_disk_of_one_rank_ends_the_attempt_of_all(tmp_path: Path, culprit: int) -> None:
    assert keys_left(tmp_path / "one", culprit, 1) == keys_left(tmp_path / "three", culprit, 3)


def test_a_state_that_moved_in_memory_is_planned_anew(tmp_path: Path) -> None:
    model = build_model(GPT2)
    section = OptimizerSection()
    optimizer = build_adamw(model, section, ())
    state = TrainerState(GPT2, [ModelPart(model, optimizer)], Grid.flat(1), tuple(checkpoint_specs(GPT2, section)))
    first = state.contents(with_optimizer=True).live
    assert state.contents(with_optimizer=True).live is first
    assert state.contents(with_optimizer=False).live is not first
    for parameter, memory in optimizer.state.items():
        optimizer.state[parameter] = {key: value.clone() for key, value in memory.items()}
    assert {t.local.data_ptr() for t in state.contents(with_optimizer=True).live} != {t.local.data_ptr() for t in first}
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    checkpointer = started(SavePolicy(tmp_path))  # the optimizer has no state for the new parameters
    checkpointer.save(1, replace(state.contents(with_optimizer=True), documents={STATE: {}}))
    checkpointer.wait()
    error = checkpointer.results.last_error
    checkpointer.close()
    assert isinstance(error, CheckpointError)
    says(str(error))
    assert [*tmp_path.glob("iter_*")] == []


class SlowToSync(Files):
    """A disk that takes writes at once, and makes none of them durable until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def sync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.opened.wait(JOIN_S)
        super().sync(descriptor)


class RefusesDirect(Files):
    """A file system that opens a file for direct writing, and refuses the writes."""

    def __init__(self) -> None:
        self.direct = set[int]()
        self.refused = 0

    def open_direct(self, path: Path) -> int | None:
        descriptor = super().open_direct(path)
        if descriptor is not None:
            self.direct.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.direct.discard(descriptor)
        super().close(descriptor)

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        if descriptor in self.direct:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().write(descriptor, data, offset=offset)
