"""What all ranks learn of a save, at once and alike, and what is left of the talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from models.build import build_model
from reprise.checkpointer import Checkpointer
from reprise.commit.channel import StoreChannel
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec
from reprise.format.names import FORMAT, STATE
from reprise.loading.reader import open_checkpoint, read_places
from reprise.policy import Retention, SavePolicy, SaveReport
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.tensors.live import Contents, Grid
from tests.fakes import JOIN_S, Sharding, all_ranks, run_ranks, tcp_store
from tests.fakes import Axis as Cut
from tests.unit.model_samples import GPT2, fill, random_values
from trainer.optim.adamw import AdamSettings, build_adamw
from trainer.run.state import ModelPart, TrainerState

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
    def call(channel: StoreChannel) -> list[object]:
        files = Exhausted(kind) if channel.rank == culprit else Files()
        # An hour: a rank that waited for a message would outlast the test.
        checkpointer = started(channel, SavePolicy(tmp_path, commit_timeout_s=3600.0), files)
        outcomes: list[object] = []
        try:
            report = checkpointer.save(1, contents(channel.rank, 1))
            outcomes.append(None if report is None else report.error)
        except MemoryError as error:
            outcomes.append(error)
        outcomes.append(checkpointer.save(2, contents(channel.rank, 2)))
        checkpointer.close()
        return outcomes

    outcomes = all_ranks(2, call)
    own, told = outcomes[culprit], outcomes[1 - culprit]
    assert isinstance(own[0], MemoryError)
    assert isinstance(told[0], CheckpointError)
    assert "MemoryError: out of memory" in str(told[0])
    for report in (own[1], told[1]):
        assert isinstance(report, SaveReport)
        assert report.error is None
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
    """A channel whose rank 1 loses every decision on a save after it was given."""

    def clone(self, timeout_s: float | None = None) -> StoreChannel:
        return Deaf(self._source, self.rank, world_size=self.world_size, timeout_s=timeout_s or self.timeout_s)

    def read(self, key: str, *, sender: str = "a peer") -> bytes:
        found = super().read(key, sender=sender)
        if self.rank == 1 and key.startswith("save/") and key.endswith("/decision"):
            raise LaunchError("No message from rank 0")
        return found


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


def test_a_deletion_that_fails_fails_no_save_on_any_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Clinging(Files):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.endswith(".deleting"):
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    def call(channel: StoreChannel) -> list[TrainerError | None]:
        checkpointer = started(channel, SavePolicy(tmp_path, retention=Retention(1)), Clinging())
        reports = [checkpointer.save(iteration, contents(channel.rank, iteration)) for iteration in (1, 2, 3, 1)]
        checkpointer.close()
        return [report.error for report in reports if report is not None]

    assert all_ranks(2, call) == [[None] * 4] * 2  # no rank takes the second save of iteration 1 for done
    assert "iteration 1 could not be deleted" in caplog.text
    for iteration in (1, 2, 3):
        found = load_file(tmp_path / f"iter_{iteration:07d}" / "model.safetensors")
        assert torch.equal(found["w"], torch.full(SPEC.shape, float(iteration)))


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_name_that_is_not_durable_deletes_nothing(tmp_path: Path, is_stuck: bool) -> None:
    class Unsynced(Files):
        is_armed = False

        def sync_folder(self, path: Path) -> None:
            if self.is_armed and path == tmp_path:
                raise OSError(5, "Input/output error")
            super().sync_folder(path)

        def rename(self, source: Path, target: Path) -> None:
            if self.is_armed and is_stuck and source.name == "iter_0000002":
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    def call(channel: StoreChannel) -> list[bool]:
        files = Unsynced()
        checkpointer = started(channel, SavePolicy(tmp_path, retention=Retention(1)), files)
        errors = []
        for iteration in (1, 2):
            files.is_armed = iteration == 2
            report = checkpointer.save(iteration, contents(channel.rank, iteration))
            assert report is not None
            errors.append(report.error is not None)
        files.is_armed = False
        checkpointer.close()
        return errors

    assert all_ranks(2, call) == [[False, not is_stuck]] * 2
    left = ["iter_0000001", "iter_0000002"] if is_stuck else ["iter_0000001"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == left


def keys_after(root: Path, saves: int) -> int:
    """Return how many keys are stored after so many saves over three ranks."""
    store = tcp_store()
    sharding = Sharding("rows over 3", (Cut("row", 3),))

    def call(channel: StoreChannel) -> None:
        checkpointer = started(channel, SavePolicy(root))
        for iteration in range(1, saves + 1):
            live = tuple(sharding.live(channel.rank, [SPEC], {"w": torch.zeros(SPEC.shape)}))
            documents = {STATE: {"format": FORMAT, "iteration": iteration}}
            report = checkpointer.save(iteration, Contents((SPEC,), live, {}, documents))
            assert report is not None
            assert report.error is None
            checkpointer.rewind(iteration)
        checkpointer.close()

    all_ranks(3, call, store=lambda: store)
    return int(store.num_keys())


def test_the_store_does_not_grow_with_the_saves(tmp_path: Path) -> None:
    assert keys_after(tmp_path / "few", 2) == keys_after(tmp_path / "many", 6)


def test_one_save_leaves_no_report_in_the_store(tmp_path: Path) -> None:
    """A library's save makes a checkpointer of its own, so no later attempt deletes the messages of this one."""
    store = tcp_store()

    def call(channel: StoreChannel) -> None:
        checkpointer = started(channel, SavePolicy(tmp_path))
        sharding = Sharding("rows over 3", (Cut("row", 3),))
        live = tuple(sharding.live(channel.rank, [SPEC], {"w": torch.zeros(SPEC.shape)}))
        documents = {STATE: {"format": FORMAT, "iteration": 1}}
        report = checkpointer.save(1, Contents((SPEC,), live, {}, documents))
        assert report is not None
        assert report.error is None
        name = f"{checkpointer._attempts.nonce}-1"
        channel.agree("past the save", None)
        if channel.rank == 0:
            for key in ("marked", "report/1", "report/2"):
                assert not store.check([f"save/{name}/{key}"])
            assert store.check([f"save/{name}/decision"])
        channel.agree("past the look", None)
        checkpointer.close()

    all_ranks(3, call, store=lambda: store)


def test_a_rank_that_is_behind_still_finds_the_last_message() -> None:
    def call(channel: StoreChannel) -> list[bytes]:
        found = []
        for turn in range(20):
            channel.agree(f"agree {turn}", None)
            found.append(channel.broadcast(f"pick {turn}", b"%d" % turn if channel.rank == 0 else None))
        return found

    assert run_ranks(4, call, store=tcp_store) == [[b"%d" % turn for turn in range(20)]] * 4


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
    torch.manual_seed(1)
    values = random_values(GPT2)

    def call(channel: StoreChannel) -> int:
        model = fill(build_model(GPT2), values)
        optimizer = build_adamw(model, AdamSettings(0.1, 0.1, 0.9, 0.95, 1e-8, frozenset()))
        state = TrainerState(GPT2, [ModelPart(model, optimizer)], Grid.flat(2))
        checkpointer = started(channel, SavePolicy(tmp_path))
        documents = {STATE: {"format": FORMAT, "iteration": 3}}
        report = checkpointer.save(3, state.contents(documents, with_optimizer=True))
        checkpointer.close()
        assert report is not None
        assert report.error is None, str(report.error)
        return report.written_bytes

    first, second = all_ranks(2, call, store=tcp_store)
    checkpoint = open_checkpoint(tmp_path / "iter_0000003", Files())
    assert first + second == sum(place.spec.total_bytes for place in read_places(checkpoint).values())
    assert min(first, second) > 0
    found = load_file(checkpoint.path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())
