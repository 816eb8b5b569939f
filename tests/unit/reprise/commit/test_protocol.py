"""What all ranks learn of a save, at once and alike, and what is left of the talk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from reprise.commit.attempt import Hosts
from reprise.commit.messages import Message
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError, LaunchError
from reprise.format.box import whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.format.names import FORMAT, STATE
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.tensors.live import Contents, LiveTensor
from tests.fakes import JOIN_S, Sharding, all_ranks
from tests.fakes import Axis as Cut

ROWS, THIRDS = (Sharding(f"rows over {count}", (Cut("row", count),)) for count in (2, 3))
SPEC = TensorSpec(TensorKind.MODEL, "w", (50, 40), StoredDtype.F32, (50, 40))


def contents(rank: int, iteration: int, sharding: Sharding = ROWS) -> Contents:
    live = tuple(sharding.live(rank, [SPEC], {"w": torch.full(SPEC.shape, float(iteration))}))
    return Contents((SPEC,), live, {}, {STATE: {"format": FORMAT, "iteration": iteration}})


def started(channel: StoreChannel, policy: SavePolicy, files: Files = FILE_SYSTEM) -> Checkpointer:
    checkpointer = Checkpointer(policy, channel, nonce="n", files=files)
    checkpointer.start()
    return checkpointer


class Exhausted(Files):
    """A file system whose calls of one kind find no memory, once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _fail(self, kind: str) -> None:
        if kind == self._kind:
            self._kind = ""
            raise MemoryError("out of memory")

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self._fail("write")
        super().write(descriptor, data, offset=offset)

    def write_new(self, path: Path, data: bytes) -> int:
        self._fail("write_new")
        return super().write_new(path, data)


@pytest.mark.parametrize(("culprit", "kind"), [(0, "write"), (1, "write"), (0, "write_new")])
def test_an_error_that_nobody_expects_reaches_all_ranks_at_once(tmp_path: Path, culprit: int, kind: str) -> None:
    def call(channel: StoreChannel) -> None:
        files = Exhausted(kind) if channel.rank == culprit else Files()
        # An hour: a rank that waited for a message would outlast the test.
        checkpointer = started(channel, SavePolicy(tmp_path, commit_timeout_s=3600.0), files)
        if channel.rank == culprit:
            with pytest.raises(MemoryError):
                checkpointer.save(1, contents(channel.rank, 1))
        else:
            report = checkpointer.save(1, contents(channel.rank, 1))
            assert report is not None
            assert isinstance(report.error, CheckpointError)
            assert "MemoryError: out of memory" in str(report.error)
        report = checkpointer.save(2, contents(channel.rank, 2))
        assert report is not None
        assert report.error is None
        checkpointer.close()

    all_ranks(2, call)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000002"]


def test_replicas_that_rank_0_lacks_are_compared_when_due(tmp_path: Path) -> None:
    own = replace(SPEC, name="own")

    def call(channel: StoreChannel) -> list[str]:
        checkpointer = started(channel, SavePolicy(tmp_path, check_replicas=2, commit_timeout_s=JOIN_S))
        spec, ranks = (SPEC, (1, 2)) if channel.rank else (own, (0,))
        live = LiveTensor(spec, whole(spec.view), torch.full(spec.shape, float(channel.rank)), ranks)
        reports = []
        for iteration in (1, 2):  # only the second save compares
            documents = {STATE: {"format": FORMAT, "iteration": iteration}}
            reports.append(checkpointer.save(iteration, Contents((own, SPEC), (live,), {}, documents)))
        checkpointer.close()
        return [str(report and report.error) for report in reports]

    for first, second in all_ranks(3, call):
        assert first == "None"
        assert "found w; rank 1 against rank 2" in second
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000001"]


def test_the_first_rank_at_another_iteration_is_named_on_all(tmp_path: Path) -> None:
    def call(channel: StoreChannel) -> str:
        checkpointer = started(channel, SavePolicy(tmp_path, commit_timeout_s=JOIN_S))
        report = checkpointer.save(5 if channel.rank else 4, contents(channel.rank, 4, THIRDS))
        assert report is not None
        checkpointer.close()
        return str(report.error)

    for error in all_ranks(3, call):
        assert "Rank 1: The ranks save different iterations" in error or error.startswith("The ranks save different")
        assert "expected iteration 4, as on rank 0, found iteration 5" in error
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


class Alone(StoreChannel):
    """A channel whose rank 0 waits for no report of rank 1 on the second attempt, which only rank 0 makes."""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        return Alone(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)

    def read_all(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        if key == "save/n-2/report" and 1 in ranks:
            raise LaunchError("No message from rank 1")
        return super().read_all(key, ranks)


def test_ranks_count_attempts_alike_after_a_wait_that_raises(tmp_path: Path) -> None:
    """The background save that one rank's lack of memory ended raises in that rank's next call."""

    def call(channel: StoreChannel) -> SaveReport:
        channel = Alone(channel._source, channel.rank, world_size=2, timeout_s=JOIN_S)
        files = Exhausted("write") if channel.rank == 1 else Files()
        checkpointer = started(channel, SavePolicy(tmp_path, commit_timeout_s=JOIN_S, async_save=True), files)
        checkpointer.save(1, contents(channel.rank, 1))
        if channel.rank == 1:
            with pytest.raises(MemoryError):
                checkpointer.save(2, contents(channel.rank, 2))
        else:
            checkpointer.save(2, contents(channel.rank, 2))
        checkpointer.wait()
        channel.agree("no save is under way", None)
        checkpointer.save(3, contents(channel.rank, 3))
        checkpointer.wait()
        checkpointer.close()
        return checkpointer.reports()[-1]

    for report in all_ranks(2, call):
        assert (report.iteration, report.error) == (3, None)


def test_a_message_sent_during_the_deletion_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = StoreChannel(HashStore(), 0, world_size=2, timeout_s=0.01)
    shared = SharedAttempt("n-1", channel, Hosts.of(channel.ranks))
    delete = channel.delete

    def delete_while_another_thread_sends(names: list[str]) -> None:
        shared.put("report", Message(problem="aborted"))
        delete(names)

    monkeypatch.setattr(channel, "delete", delete_while_another_thread_sends)
    shared.put("opened", Message(number=7))
    assert shared.read("opened", 0) == Message(number=7)
    shared.delete_read()
    assert shared.left == {"save/n-1/report": ["save/n-1/report/0"]}
    assert not channel.has(["save/n-1/opened/0"])
    assert shared.read("report", 0).problem == "aborted"


def test_a_decision_repeats_no_message_of_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, sent = StoreChannel(HashStore(), 0, world_size=2, timeout_s=0.01), list[str]()
    shared = SharedAttempt("n-1", channel, Hosts(("a", "b"), ((0,), (1,))))
    put = channel.put

    def note(key: str, data: bytes, *, is_first: bool = True) -> list[str]:
        sent.append(key.rpartition("/")[2])
        return put(key, data, is_first=is_first)

    monkeypatch.setattr(channel, "put", note)
    shared.put("opened", Message(number=7))
    shared.decide(Message(problem="aborted"))
    shared.decide(Message(number=7))
    assert sent == ["opened", "decision", "files"]
    assert shared.read("opened", 0) == Message(number=7)
    assert shared.read("decision", 0).problem == "aborted"


class Deaf(StoreChannel):
    """A channel whose rank 1 loses the decisions on all saves, or on an attempt, after they were given."""

    attempt = ""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        channel = Deaf(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)
        channel.attempt = self.attempt
        return channel

    def read_all(self, key: str, ranks: Sequence[int]) -> list[bytes]:
        messages = super().read_all(key, ranks)
        if self.rank == 1 and key.startswith(f"save/{self.attempt}") and key.endswith("/decision"):
            raise LaunchError("No message from rank 0")
        return messages


@pytest.mark.parametrize("kind", [StoreChannel, Deaf])
def test_all_ranks_save_again_any_iteration_but_the_newest(tmp_path: Path, kind: type[StoreChannel]) -> None:
    def call(channel: StoreChannel) -> list[bool]:
        channel = kind(channel._source, channel.rank, world_size=2, timeout_s=10.0)
        policy = SavePolicy(tmp_path, retention=Retention(2, save_retain_interval=4), commit_timeout_s=10.0)
        checkpointer = started(channel, policy)
        for iteration in (1, 2, 3, 4, 5, 6):
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            assert report.error is None, str(report.error)
        reports = [
            checkpointer.save(iteration, contents(channel.rank, iteration)) for iteration in (6, 4, 4, 6, 1, 3, 3)
        ]
        assert all(report is None or report.error is None for report in reports)
        checkpointer.close()
        return [report is None for report in reports]

    assert all_ranks(2, call) == [[True, False, True, False, False, False, True]] * 2


class Slow(Files):
    """A file system that renames iteration 1 once it may."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "iter_0000001":
            self.reached.set()
            assert self.opened.wait(JOIN_S)
        super().rename(source, target)


def test_ranks_agree_about_a_save_that_was_in_doubt_on_rank_0(tmp_path: Path) -> None:
    """Rank 0 stops waiting before the rename, which then succeeds: the other rank knows that the iteration is saved."""
    slow, patient = Slow(), SavePolicy(tmp_path, async_save=True, commit_timeout_s=JOIN_S)

    def call(channel: StoreChannel) -> list[SaveReport]:
        checkpointer = started(channel, patient, slow if channel.rank == 0 else Files())
        checkpointer.save(1, contents(channel.rank, 1))
        if channel.rank == 0:
            assert slow.reached.wait(JOIN_S)
            checkpointer._policy = replace(patient, commit_timeout_s=0.01)
            checkpointer.wait()
            checkpointer._policy = patient
            assert "checks whether this one was committed" in str(checkpointer.reports()[0].error)
            slow.opened.set()
            checkpointer.drain(JOIN_S)
        else:
            checkpointer.wait()
            assert checkpointer.reports()[0].error is None
        checkpointer.save(1, contents(channel.rank, 1))
        checkpointer.wait()
        checkpointer.close()
        return checkpointer.reports()

    assert all_ranks(2, call) == [[], []]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["iter_0000001"]


def test_a_late_commit_leaves_the_messages_of_later_attempts(tmp_path: Path) -> None:
    """While a rename hangs on rank 0, its main thread refuses the next save, which the other rank reads afterwards."""
    slow, patient = Slow(), SavePolicy(tmp_path, async_save=True, commit_timeout_s=JOIN_S)

    def call(channel: StoreChannel) -> str:
        checkpointer = started(channel, patient, slow if channel.rank == 0 else Files())
        checkpointer.save(1, contents(channel.rank, 1))
        if channel.rank == 0:
            assert slow.reached.wait(JOIN_S)
            checkpointer._policy = replace(patient, commit_timeout_s=0.01)
            checkpointer.save(2, contents(channel.rank, 2))
            checkpointer._policy = patient
            slow.opened.set()
            checkpointer.drain(JOIN_S)
        channel.agree("the late commit has ended", None)
        if channel.rank == 1:
            checkpointer.save(2, contents(channel.rank, 2))
            checkpointer.wait()
        checkpointer.close()
        return str(checkpointer.reports()[-1].error)

    assert all("the disk stalled" in error for error in all_ranks(2, call))
