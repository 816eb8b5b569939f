"""What all ranks learn of a save, at once and alike, and what is left of the talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from reprise.errors import CheckpointError, LaunchError
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.format.names import FORMAT, STATE
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder
from reprise.tensors.live import Contents
from tests.fakes import JOIN_S, Sharding, all_ranks, sample_specs, sample_state, tcp_store
from tests.fakes import Axis as Cut

ROWS = Sharding("rows over 2", (Cut("row", 2),))
SPEC = TensorSpec(TensorKind.MODEL, "w", (50, 40), StoredDtype.F32, (50, 40))


def contents(rank: int, iteration: int) -> Contents:
    live = tuple(ROWS.live(rank, [SPEC], {"w": torch.full(SPEC.shape, float(iteration))}))
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

    def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
        self._fail("write")
        super().write(descriptor, buffers, offset=offset)

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


class Alone(StoreChannel):
    """A channel whose rank 0 waits for no report of rank 1 on the second attempt, which only rank 0 makes."""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        return Alone(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)

    def read_all(self, senders: Mapping[str, str]) -> list[bytes]:
        if "save/n-2/report/1" in senders:
            raise LaunchError("No message from rank 1")
        return super().read_all(senders)


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


class Deaf(StoreChannel):
    """A channel whose rank 1 loses the decisions on all saves, or on an attempt, after they were given."""

    attempt = ""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        channel = Deaf(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)
        channel.attempt = self.attempt
        return channel

    def read(self, key: str, *, sender: str = "a peer") -> bytes:
        message = super().read(key, sender=sender)
        if self.rank == 1 and key.startswith(f"save/{self.attempt}") and key.endswith("/decision"):
            raise LaunchError("No message from rank 0")
        return message


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


@pytest.mark.parametrize(("refused", "left"), [("deletion", [1, 2, 3]), ("sync", [1]), ("undo", [1, 2])])
def test_what_a_disk_refuses_deletes_nothing_too_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str, left: list[int]
) -> None:
    class Refusing(Files):
        """A disk that refuses to delete, or to make the commit of an iteration durable, or to take it back too."""

        is_armed = False

        def sync_folder(self, path: Path) -> None:
            if self.is_armed and refused != "deletion" and path == tmp_path:
                raise OSError(5, "Input/output error")
            super().sync_folder(path)

        def rename(self, source: Path, target: Path) -> None:
            is_deletion, is_undone = target.name.endswith(".deleting"), source.name == "iter_0000002"
            if (refused == "deletion" and is_deletion) or (self.is_armed and refused == "undo" and is_undone):
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    # No rank takes the second save of iteration 1 for done.
    iterations = (1, 2, 3, 1) if refused == "deletion" else (1, 2)

    def call(channel: StoreChannel) -> list[bool]:
        files = Refusing()
        checkpointer = started(channel, SavePolicy(tmp_path, retention=Retention(1)), files)
        failed = []
        for iteration in iterations:
            files.is_armed = iteration == 2
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            failed.append(report.error is not None)
        files.is_armed = False
        checkpointer.close()
        return failed

    expected = [refused == "sync" and iteration == 2 for iteration in iterations]
    assert all_ranks(2, call) == [expected] * 2
    assert CheckpointFolder(tmp_path, Files()).committed() == left
    for iteration in left:
        tensors = load_file(tmp_path / f"iter_{iteration:07d}" / "model.safetensors")
        assert torch.equal(tensors["w"], torch.full(SPEC.shape, float(iteration)))
    assert ("iteration 1 could not be deleted" in caplog.text) == (refused == "deletion")


def test_the_store_does_not_grow_with_the_saves(tmp_path: Path) -> None:
    """Nor is a report left: a library's save makes a checkpointer of its own, so no later attempt deletes it."""
    store = tcp_store()

    def call(channel: StoreChannel) -> list[int]:
        checkpointer, counts = started(channel, SavePolicy(tmp_path)), []
        for iteration in range(1, 7):
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            assert report.error is None
            checkpointer.rewind(iteration)
            channel.agree("past the save", None)
            counts.append(int(store.num_keys()) if channel.rank == 0 else 0)
            attempt = f"save/{checkpointer._attempts.nonce}-{iteration}"
            assert not any(store.check([f"{attempt}/{key}"]) for key in ("marked", "report/1"))
            channel.agree("past the look", None)
        checkpointer.close()
        return counts

    counts, _ = all_ranks(2, call, store=lambda: store)
    assert max(counts) <= counts[1]


COLLECTIVES = [
    name
    for name in dir(dist)
    if name.split("_")[0] in ("all", "barrier", "batch", "broadcast", "gather", "irecv", "isend", "monitored", "new")
    or name.split("_")[0] in ("init", "recv", "reduce", "scatter", "send")
]


def test_a_save_of_replicas_calls_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    assert {"all_gather_object", "all_reduce", "barrier", "broadcast", "reduce_scatter", "send"} <= set(COLLECTIVES)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective was called")

    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, refuse)
        monkeypatch.setattr(dist.distributed_c10d, name, refuse, raising=False)
    specs, replicas = sample_specs(), Sharding("2 replicas", (Cut("replica", 2),))
    state = sample_state(specs, seed=1)

    def call(channel: StoreChannel) -> int:
        checkpointer = started(channel, SavePolicy(tmp_path))
        documents = {STATE: {"format": FORMAT, "iteration": 3}}
        live = tuple(replicas.live(channel.rank, specs, state))
        report = checkpointer.save(3, Contents(tuple(specs), live, {}, documents))
        checkpointer.close()
        assert report is not None
        assert report.error is None, str(report.error)
        return report.written_bytes

    first, second = all_ranks(2, call, store=tcp_store)
    assert first + second == sum(spec.total_bytes for spec in specs)
    assert min(first, second) > 0
    tensors = load_file(tmp_path / "iter_0000003/model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
