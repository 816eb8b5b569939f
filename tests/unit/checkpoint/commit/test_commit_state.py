"""What becomes of a save whatever happens to its messages: the state alone, and ranks on a faulty store."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turns import Fault, FaultyStore, Task, Turns
from trainer.checkpoint.commit import channel as channel_module
from trainer.checkpoint.commit import commit_state, messages
from trainer.checkpoint.commit.attempt import Attempt, SharedCommitState
from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.commit.commit_state import Action, CommitStage, CommitState, Event, Outcome
from trainer.checkpoint.commit.hosts import Hosts
from trainer.checkpoint.format.box import Box
from trainer.checkpoint.format.layout import TensorKind, TensorSpec, build_layout
from trainer.checkpoint.format.manifest import DIGEST_BYTES, Written, WrittenPiece
from trainer.checkpoint.format.names import FORMAT, STATE
from trainer.checkpoint.policy import Retention
from trainer.checkpoint.saving.column_sharing import LocalRanks
from trainer.checkpoint.saving.plan import Plan
from trainer.checkpoint.saving.replica_digests import ReplicaDigests
from trainer.checkpoint.saving.save_job import SaveJob
from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.tensors.arena import Arena
from trainer.checkpoint.tensors.live import Contents
from trainer.checkpoint.tensors.memory import Sources
from trainer.errors import CheckpointError, TrainerError

PATIENCE_S = 0.3  # of a rank that waits for a message
LIMIT_S = 6.0  # by then every rank has ended, whatever it has waited for
MOST_RANKS = 3
ODD = TensorSpec(TensorKind.MODEL, "other", (2,), torch.float32, (2,))


@dataclass(frozen=True)
class Troubles:
    """What happens in one attempt to save.

    Args:
        work_s: how long each rank writes; None for ever.
        disk_s: how long each of rank 0's calls to the disk takes then.
        broken: the ranks whose writing fails.
        aborts_s: when the main thread of a rank aborts, if its worker has not ended.
        renames: whether the rename succeeds.
        syncs: whether it is made durable after that; `takes_back`: whether it can be undone if not.
        odd: the ranks that save another table of tensors than rank 0.
        faults: what a rank's call of the store, by number, meets.
        stops_at: the call of anybody from which on the store's host stands still; `dies_at` is gone.
    """

    ranks: int
    seed: int
    work_s: tuple[float | None, ...]
    disk_s: float
    broken: frozenset[int]
    aborts_s: tuple[float | None, ...]
    renames: bool
    syncs: bool
    takes_back: bool
    odd: frozenset[int]
    faults: dict[tuple[int, int], Fault]
    stops_at: int | None
    dies_at: int | None

    @property
    def are_messages_safe(self) -> bool:
        """Return whether every message arrives long before anybody stops waiting for it."""
        is_quick = all(work_s is not None and work_s < PATIENCE_S / 3 for work_s in self.work_s)
        return is_quick and not self.faults and self.stops_at is None and self.dies_at is None


@st.composite
def troubles(draw: st.DrawFn, *, with_faults: bool = True) -> Troubles:
    """Draw the troubles of an attempt."""
    ranks = draw(st.integers(1, MOST_RANKS))
    quick = st.sampled_from([0.0, 0.001, 0.02, 0.05])
    slow = st.sampled_from([0.2, 0.4, 1.0, None])
    moment = st.integers(0, 60).map(lambda number: number / 400) | st.sampled_from([0.3, 0.5, 1.0])
    call = st.tuples(st.integers(0, ranks - 1), st.integers(1, 40))
    faults = st.dictionaries(call, st.sampled_from(Fault), max_size=3)
    from_call = st.none() | st.integers(1, 60)
    return Troubles(
        ranks,
        draw(st.integers(0, 2**32)),
        tuple(draw(quick | slow if with_faults else quick) for _ in range(ranks)),
        draw(st.sampled_from([0.0, 0.005, 0.01])),
        draw(st.frozensets(st.integers(0, 3 * ranks), max_size=1)),
        tuple(draw(st.none() | moment) for _ in range(ranks)),
        *(draw(st.sampled_from([True, True, True, False])) for _ in ("renames", "syncs", "takes_back")),
        draw(st.just(frozenset[int]()) | st.frozensets(st.integers(1, MOST_RANKS), max_size=2)),
        draw(faults) if with_faults else {},
        draw(from_call) if with_faults else None,
        draw(from_call) if with_faults else None,
    )


class Disk(Files):
    """A disk whose calls take turns, which makes nothing durable and counts the commits."""

    def __init__(self, turns: Turns, root: Path, told: Troubles) -> None:
        self._turns, self._root, self._told = turns, root, told
        self._call_s = told.disk_s
        self.commits = 0
        self.is_taken_back = False

    def sync(self, descriptor: int) -> None:
        self._turns.sleep(self._call_s)

    def sync_folder(self, path: Path) -> None:
        self._turns.sleep(self._call_s)
        if path == self._root and not self._told.syncs:
            raise OSError(5, "Input/output error")

    def write_whole(self, path: Path, data: bytes) -> None:
        self._turns.sleep(self._call_s)
        super().write_whole(path, data)

    def rename(self, source: Path, target: Path) -> None:
        self._turns.sleep(self._call_s)
        is_commit, takes_back = target.name.startswith("iter_"), source.name.startswith("iter_")
        if (is_commit and not self._told.renames) or (takes_back and not self._told.takes_back):
            raise OSError(5, "Input/output error")
        super().rename(source, target)
        self.commits += is_commit - takes_back
        self.is_taken_back |= takes_back


@dataclass
class Rank:
    """What a rank does in an attempt, and what came of it."""

    number: int
    shared: SharedCommitState
    worker: Task | None = None
    main: Task | None = None
    has_returned: bool = False
    is_abort_certain: bool = False


class NotingState(SharedCommitState):
    """The state of a rank, which notes who has written when the rename begins."""

    def __init__(self, rank: int, world_size: int, attempted: Attempted) -> None:
        super().__init__(rank, world_size)
        self._attempted = attempted

    def take(self, event: Event) -> Action:
        action = super().take(event)
        if action is Action.RENAME:
            self._attempted.written_at_commit = set(self._attempted.written)
        return action


@dataclass
class Attempted:
    """An attempt to save by ranks that take turns over a faulty store."""

    told: Troubles
    root: Path
    ranks: list[Rank] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    written_at_commit: set[int] | None = None

    def __post_init__(self) -> None:
        told = self.told
        self.turns = Turns(told.seed, limit_s=LIMIT_S)
        self.store = FaultyStore(self.turns, told.faults, stops_at=told.stops_at, dies_at=told.dies_at)
        self.disk = Disk(self.turns, self.root, told)
        spec = TensorSpec(TensorKind.MODEL, "w", (told.ranks,), torch.float32, (told.ranks,))
        folder = CheckpointFolder(self.root, self.disk)
        self.attempt = Attempt(7, "n-1", folder, build_layout([spec]), Hosts.shared(told.ranks))
        for number in range(told.ranks):
            rank = Rank(number, NotingState(number, told.ranks, self))
            rank.worker = self.turns.add(f"worker {number}", number, lambda rank=rank: self._save(rank))
            if told.aborts_s[number] is not None:
                rank.main = self.turns.add(f"main {number}", number, lambda rank=rank: self._abort(rank))
            self.ranks.append(rank)

    def run(self) -> None:
        """Let it happen."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel_module, "time", self.turns)
            self.turns.run()

    @property
    def is_committed(self) -> bool:
        return messages.is_committed(self.attempt)

    def channel(self, rank: Rank) -> StoreChannel:
        """Return the channel of a rank."""
        return StoreChannel(self.store.of(rank.number), rank.number, world_size=self.told.ranks, timeout_s=PATIENCE_S)

    def _save(self, rank: Rank) -> None:
        SimulatedJob.of(self, rank).run()
        rank.has_returned = True

    def write(self, number: int) -> Written:
        """Write the part of a rank."""
        work_s = self.told.work_s[number]
        if work_s is None:
            self.turns.hang()
        else:
            self.turns.sleep(work_s)
        if number in self.told.broken:
            raise CheckpointError("There is no room")
        self.attempt.folder.partial(7, "n-1").mkdir(exist_ok=True)
        self.written.add(number)
        return Written([WrittenPiece("w", Box((number,), (1,)), 0, 4, bytes(DIGEST_BYTES))], 4)

    def _abort(self, rank: Rank) -> None:
        self.turns.sleep(self.told.aborts_s[rank.number] or 0.0)
        assert rank.worker is not None
        if not rank.worker.is_over:
            error = CheckpointError("A save did not end in time")
            rank.is_abort_certain = messages.abort(self.channel(rank), self.attempt, error, rank.shared)


@dataclass(slots=True)
class SimulatedJob(SaveJob):
    """A save whose writing follows the troubles; all the rest is the engine's."""

    number: int = 0
    attempted: Attempted | None = None

    @staticmethod
    def of(attempted: Attempted, rank: Rank) -> SimulatedJob:
        """Return the save of a rank."""
        layout = build_layout([ODD]) if rank.number in attempted.told.odd else attempted.attempt.layout
        nothing = Sources([], None)
        plan = Plan((), (), (), layout, [], {}, [], nothing, {}, nothing)
        channel = attempted.channel(rank)
        return SimulatedJob(
            attempt=attempted.attempt,
            contents=Contents((), (), {}, {STATE: {"format": FORMAT, "iteration": 7}}),
            plan=plan,
            snapshot=Snapshot({}, [], arena=Arena(0, is_pinned=False), stall_timeout_s=1.0),
            replicas=ReplicaDigests({}, [], {}, {}),
            channel=channel,
            shared=rank.shared,
            lock=None,
            retention=Retention(),
            pinned=(),
            local_ranks=LocalRanks(channel, ()),
            number=rank.number,
            attempted=attempted,
        )

    def write(self, partial: Path) -> Written:
        assert self.attempted is not None
        return self.attempted.write(self.number)


def attempted(told: Troubles) -> Attempted:
    """Let an attempt happen, and hold it to what is promised whatever happens."""
    with tempfile.TemporaryDirectory() as root:
        found = Attempted(told, Path(root))
        found.run()
        is_committed = found.is_committed
        assert found.disk.commits == is_committed
        if is_committed:
            assert found.written_at_commit == set(range(told.ranks))
            assert not told.odd & set(range(told.ranks))
        for rank in found.ranks:
            assert rank.worker is not None
            outcome = rank.shared.current.outcome
            if rank.has_returned or outcome is Outcome.COMMITTED:
                # A rank that hears nothing may look just before what is not durable is taken back.
                assert is_committed or (rank.number > 0 and found.disk.is_taken_back and not told.are_messages_safe)
            if rank.is_abort_certain or outcome is Outcome.FAILED:
                assert not is_committed
            for task in (rank.worker, rank.main):
                assert task is None or task.is_over or task.is_held, f"{task.name} has not ended"
            if rank.worker.is_over:
                assert rank.shared.current.stage is CommitStage.ENDED
                assert rank.has_returned == (outcome is Outcome.COMMITTED)
                assert rank.has_returned or isinstance(rank.worker.error, TrainerError)
            assert rank.main is None or rank.main.error is None or rank.main.is_held
        return found


@given(troubles())
@settings(max_examples=400, deadline=None)
def test_no_rank_contradicts_the_folder_and_all_end(told: Troubles) -> None:
    attempted(told)


@given(troubles(with_faults=False))
@settings(max_examples=200, deadline=None)
def test_where_messages_arrive_all_ranks_hear_one_outcome(told: Troubles) -> None:
    assert told.are_messages_safe
    found = attempted(told)
    with_committed = Outcome.COMMITTED if found.disk.commits else Outcome.FAILED
    assert [rank.shared.current.outcome for rank in found.ranks] == [with_committed] * told.ranks


def calm(ranks: int, **changes: object) -> Troubles:
    """Return an attempt in which nothing happens but the changes."""
    nobody = (None,) * ranks
    told = dict[str, object](
        ranks=ranks,
        seed=1,
        work_s=(0.01,) * ranks,
        disk_s=0.005,
        broken=frozenset(),
        aborts_s=nobody,
        renames=True,
        syncs=True,
        takes_back=True,
        odd=frozenset(),
        faults={},
    )
    return Troubles(**{**told, "stops_at": None, "dies_at": None, **changes})  # type: ignore[arg-type]


def outcomes(found: Attempted) -> list[Outcome | None]:
    return [rank.shared.current.outcome for rank in found.ranks]


def test_without_troubles_all_ranks_commit() -> None:
    found = attempted(calm(3))
    assert outcomes(found) == [Outcome.COMMITTED] * 3


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_name_that_is_not_durable_is_one_thing_to_all_ranks(takes_back: bool) -> None:
    found = attempted(calm(3, syncs=False, takes_back=takes_back))
    assert outcomes(found) == [Outcome.FAILED if takes_back else Outcome.COMMITTED] * 3


@pytest.mark.parametrize("odd", [{1}, {2}, {1, 2}])
def test_ranks_that_save_other_tensors_are_named_on_every_rank(odd: set[int]) -> None:
    found = attempted(calm(3, odd=frozenset(odd)))
    assert outcomes(found) == [Outcome.FAILED] * 3
    for rank in found.ranks:
        assert rank.worker is not None
        assert f"w only on rank 0; other only on rank {min(odd)}" in str(rank.worker.error)


@pytest.mark.parametrize("number", range(3))
def test_a_part_that_fails_is_named_on_every_rank(number: int) -> None:
    found = attempted(calm(3, broken=frozenset({number})))
    texts = [str(rank.worker.error) for rank in found.ranks if rank.worker is not None]
    assert texts[number] == "There is no room."
    assert all("There is no room" in text for text in texts)
    assert outcomes(found) == [Outcome.FAILED] * 3


def test_a_host_that_stops_at_any_call_misleads_no_rank() -> None:
    total = attempted(calm(2)).store.calls
    commits = [attempted(calm(2, stops_at=call)).disk.commits for call in range(1, total + 1)]
    assert total > 10
    assert sorted(commits) == commits  # from some call on it had been committed
    assert set(commits) == {0, 1}


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_aborts_shares_the_outcome_of_all(number: int) -> None:
    commits = []
    for moment in range(40):
        aborts_s: list[float | None] = [None, None]
        aborts_s[number] = moment / 500
        for seed in range(5):
            found = attempted(calm(2, seed=seed, aborts_s=tuple(aborts_s)))
            commits.append(found.disk.commits)
            assert outcomes(found) == [Outcome.COMMITTED if found.disk.commits else Outcome.FAILED] * 2
    assert set(commits) == {0, 1}


@pytest.mark.parametrize("dies_with", [Fault.KILLS, Fault.HANGS, Fault.FAILS, Fault.LATE, Fault.DROPS, Fault.REPEATS])
@pytest.mark.parametrize("number", [0, 1])
def test_no_single_fault_makes_a_rank_contradict_the_folder(number: int, dies_with: Fault) -> None:
    for call in range(1, 20):
        attempted(calm(2, faults={(number, call): dies_with}))


EVENTS: st.SearchStrategy[Event] = st.sampled_from(
    [
        commit_state.Wrote(),
        commit_state.Failed("no room"),
        commit_state.ReportStored(),
        *(commit_state.ReportArrived(rank, problem) for rank in range(MOST_RANKS) for problem in (None, "no room")),
        commit_state.ReadyToRename(),
        commit_state.Renamed(),
        commit_state.Broadcast(),
        commit_state.Decision(None),
        commit_state.Decision("no room"),
        commit_state.Silence("nothing came"),
        commit_state.FoundCommitted(),
        commit_state.FoundNothing(),
        commit_state.Aborted("time is over"),
    ]
)


@given(st.integers(0, MOST_RANKS - 1), st.lists(EVENTS, max_size=25))
@settings(max_examples=500, deadline=None)
def test_no_order_of_events_renames_twice_or_wrongly(rank: int, events: list[Event]) -> None:
    known, whole, renames = CommitState.of(rank, MOST_RANKS), set[int](), 0
    for event in events:
        before = known
        known, action = commit_state.advance(known, event)
        if isinstance(event, commit_state.Wrote) and before.stage is CommitStage.WRITING:
            whole.add(rank)
        if (
            isinstance(event, commit_state.ReportArrived)
            and event.problem is None
            and before.stage is CommitStage.COLLECTING
        ):
            whole.add(event.rank)
        if action is Action.RENAME:
            renames += 1
            assert rank == 0
            assert before.outcome is None
            assert whole == set(range(MOST_RANKS))
        assert renames <= 1
        if before.outcome is not None:  # what is decided stays
            assert known.outcome is before.outcome
        if before.stage is CommitStage.ENDED:
            assert known == before
            assert action is (Action.NOTHING if isinstance(event, commit_state.Aborted) else Action.END)
        if known.outcome is Outcome.COMMITTED and rank == 0:
            assert renames == 1
        if known.stage is CommitStage.ENDED:
            assert known.outcome is not None


@pytest.mark.parametrize("stage", list(CommitStage))
@pytest.mark.parametrize("rank", [0, 1])
def test_aborting_twice_is_aborting_once(rank: int, stage: CommitStage) -> None:
    first, action = commit_state.advance(CommitState(rank, frozenset(), stage), commit_state.Aborted("time is over"))
    assert commit_state.advance(first, commit_state.Aborted("again")) == (first, Action.NOTHING)
    assert (first.outcome is Outcome.FAILED) == (action is not Action.NOTHING)
