"""What becomes of a save whatever happens to its messages: the state alone, and ranks on a faulty store."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.commit import commit_state
from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.commit_state import Action, CommitState, Event, Outcome
from reprise.commit.joint_plan import KnownPlans, encode
from reprise.commit.messages import Message
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError, TrainerError
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.host_file import HostFile, attempt_of
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.format.manifest import DIGEST_BYTES, Piece, digest_of
from reprise.format.names import FORMAT, HOST, MANIFEST, STATE
from reprise.ranks import channel as channel_module
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.plan import Plan
from reprise.saving.policy import Retention, SavePolicy, SaveReport
from reprise.saving.save_job import SaveJob
from reprise.saving.snapshot import Snapshot
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.tensors.live import Contents
from reprise.tensors.memory import Arena
from tests.profiles import examples
from tests.turns import Fault, FaultyStore, Task, Turns

PATIENCE_S = 0.3  # of a rank that waits for a message
LIMIT_S = 6.0  # by then every rank has ended, whatever it has waited for
MOST_RANKS = 3
HOSTS = [(0,), (0, 1), (0, 2), (0, 1, 2)]  # the leaders of three ranks: one folder for all, two hosts, three
ODD = TensorSpec(TensorKind.MODEL, "other", (2,), StoredDtype.F32, (2,))


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
        leaders: the first rank of each host, if each has a folder of its own; rank 0 alone for a shared folder.
        bad_hosts: the hosts whose rename meets `renames`, `syncs` and `takes_back`; on the others all is well.
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
    leaders: tuple[int, ...] = (0,)
    bad_hosts: frozenset[int] = frozenset({0})

    @property
    def is_local(self) -> bool:
        """Return whether each host has a folder of its own."""
        return len(self.leaders) > 1

    @property
    def hosts(self) -> Hosts:
        """Return the hosts; one host stands for a shared folder."""
        if not self.is_local:
            return Hosts.of(range(self.ranks))
        ends = (*self.leaders[1:], self.ranks)
        members = tuple(tuple(range(first, end)) for first, end in zip(self.leaders, ends, strict=True))
        return Hosts(tuple(f"host{number}" for number in range(len(members))), members)

    def fails_to_rename(self, host: int) -> bool:
        """Return whether the folder of a host keeps its partial name when it is to be renamed."""
        return host in self.bad_hosts and (not self.renames or (not self.syncs and self.takes_back))

    @property
    def are_messages_safe(self) -> bool:
        """Return whether every message arrives long before anybody stops waiting for it."""
        is_quick = all(work_s is not None and work_s < PATIENCE_S / 3 for work_s in self.work_s)
        return is_quick and not self.faults and self.stops_at is None and self.dies_at is None


@st.composite
def troubles(draw: st.DrawFn) -> Troubles:
    """Draw the troubles of an attempt, into a shared folder or into hosts' folders; in half of them nothing is lost."""
    ranks, has_faults = draw(st.integers(1, MOST_RANKS)), draw(st.booleans())
    leaders = draw(st.sampled_from([hosts for hosts in HOSTS if hosts[-1] < ranks]))
    quick = st.sampled_from([0.0, 0.001, 0.02, 0.05])
    slow = st.sampled_from([0.2, 0.4, 1.0, None])
    moment = st.integers(0, 60).map(lambda number: number / 400) | st.sampled_from([0.3, 0.5, 1.0])
    call = st.tuples(st.integers(0, ranks - 1), st.integers(1, 40))
    faults = st.dictionaries(call, st.sampled_from(Fault), max_size=3)
    from_call = st.none() | st.integers(1, 60)
    return Troubles(
        ranks,
        draw(st.integers(0, 2**32)),
        tuple(draw(quick | slow if has_faults else quick) for _ in range(ranks)),
        draw(st.sampled_from([0.0, 0.005, 0.01])),
        draw(st.frozensets(st.integers(0, 3 * ranks), max_size=1)),
        tuple(draw(st.none() | moment) for _ in range(ranks)),
        *(draw(st.sampled_from([True, True, True, False])) for _ in ("renames", "syncs", "takes_back")),
        draw(st.just(frozenset[int]()) | st.frozensets(st.integers(1, MOST_RANKS), max_size=2)),
        draw(faults) if has_faults else {},
        draw(from_call) if has_faults else None,
        draw(from_call) if has_faults else None,
        leaders,
        draw(st.frozensets(st.integers(0, len(leaders) - 1), max_size=2)) if len(leaders) > 1 else frozenset({0}),
    )


class Disk(Files):
    """The disk of a host, whose calls take turns, which makes nothing durable and counts the commits.

    Args:
        may_commit: whether a commit is in order at the moment.
    """

    def __init__(self, turns: Turns, root: Path, told: Troubles, host: int, may_commit: Callable[[], bool]) -> None:
        self._turns, self._root, self._told, self._may_commit = turns, root, told, may_commit
        self._is_bad = host in told.bad_hosts
        self._call_s = told.disk_s
        self.commits = 0
        self.is_taken_back = False
        self.has_committed_wrongly = False

    def sync(self, descriptor: int) -> None:
        self._turns.sleep(self._call_s)

    def sync_folder(self, path: Path) -> None:
        self._turns.sleep(self._call_s)
        if path == self._root and self._is_bad and not self._told.syncs:
            raise OSError(5, "Input/output error")

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        for sync in syncs:  # a thread of its own would take no turn
            sync()

    def write_new(self, path: Path, data: bytes) -> int:
        self._turns.sleep(self._call_s)
        return super().write_new(path, data)

    def rename(self, source: Path, target: Path) -> None:
        self._turns.sleep(self._call_s)
        is_commit, takes_back = target.name.startswith("iter_"), target.name.endswith(".partial")
        is_refused = (is_commit and not self._told.renames) or (takes_back and not self._told.takes_back)
        if self._is_bad and is_refused:
            raise OSError(5, "Input/output error")
        self.has_committed_wrongly |= is_commit and not self._may_commit()
        super().rename(source, target)
        self.commits += is_commit - takes_back
        self.is_taken_back |= takes_back


class NoCopies:
    """Copies nothing; its messages travel with the commit. Implements `Copying`."""

    pinned = ()

    def __init__(self) -> None:
        self.orders: list[bytes] = []

    def status(self, iteration: int) -> bytes:
        return b"status"

    def decide(self, statuses: Sequence[bytes]) -> bytes:
        return b" ".join(statuses)

    def committed(self, attempt: Attempt, order: bytes) -> None:
        self.orders.append(order)


@dataclass
class Rank:
    """What a rank does in an attempt, and what came of it."""

    number: int
    shared: SharedAttempt
    worker: Task | None = None
    main: Task | None = None
    has_returned: bool = False
    is_abort_certain: bool = False


class Unsynced(Files):
    """A file system that makes nothing durable."""

    def sync_folder(self, path: Path) -> None:
        return


def put_checkpoint(path: Path, attempt: str, hosts: Hosts, host: int) -> None:
    """Make a committed folder of a host, as far as a start looks at it."""
    path.mkdir()
    (path / MANIFEST).write_bytes(b"{}")
    (path / HOST).write_bytes(HostFile(attempt, digest_of(b"{}"), host, hosts.names, {}, {}).to_bytes())


@dataclass
class Attempted:
    """An attempt to save by ranks that take turns over a faulty store."""

    told: Troubles
    root: Path
    ranks: list[Rank] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    jobs: dict[int, SimulatedJob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = self.told
        self.turns = Turns(told.seed, limit_s=LIMIT_S)
        self.store = FaultyStore(self.turns, told.faults, stops_at=told.stops_at, dies_at=told.dies_at)
        spec = TensorSpec(TensorKind.MODEL, "w", (told.ranks,), StoredDtype.F32, (told.ranks,))
        layout, self.hosts = build_layout([spec]), told.hosts
        self.disks: list[Disk] = []
        self.attempts: list[Attempt] = []
        for host in range(len(self.hosts.leaders)):
            root = self.root / str(host)
            root.mkdir()
            disk = Disk(self.turns, root, told, host, lambda host=host: self.may_commit(host))
            self.disks.append(disk)
            self.attempts.append(Attempt(7, "n-1", CheckpointFolder(root, disk), layout, self.hosts))
            if told.is_local:
                put_checkpoint(root / "iter_0000006", "n-0", self.hosts, host)
        for number in range(told.ranks):
            rank = Rank(number, SharedAttempt("n-1", self.channel(number), self.hosts))
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
        """Return whether the checkpoint exists: rank 0's folder has its final name."""
        return self.attempts[0].is_committed()

    def may_commit(self, host: int) -> bool:
        """Return whether a rename is in order: all is written and prepared, and rank 0's folder is the first."""
        paths = [path for attempt in self.attempts for path in (attempt.partial, attempt.folder.iteration(7))]
        are_prepared = sum((path / MANIFEST).exists() for path in paths) == len(self.attempts)
        return are_prepared and self.written == set(range(self.told.ranks)) and (host == 0 or self.is_committed)

    def attempt(self, rank: int) -> Attempt:
        """Return the attempt as a rank knows it, with the folder of its host."""
        return self.attempts[self.hosts.number_of(rank)]

    def restart(self) -> None:
        """Let all ranks start again and acquire their folders, with nothing in their way."""
        turns = Turns(self.told.seed, limit_s=LIMIT_S)
        store = FaultyStore(turns, {}, stops_at=None, dies_at=None)

        def acquire(rank: int) -> None:
            channel = StoreChannel(store.of(rank), rank, world_size=self.told.ranks, timeout_s=PATIENCE_S)
            policy = SavePolicy(self.attempt(rank).folder.root)
            checkpointer = Checkpointer(policy, channel, nonce="again", files=Unsynced(), hosts=self.hosts)
            try:
                checkpointer.start()
            finally:
                checkpointer.abandon()

        tasks = [turns.add(f"start {rank}", rank, lambda rank=rank: acquire(rank)) for rank in range(self.told.ranks)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel_module, "time", turns)
            patch.setattr(os, "fsync", lambda _: None)
            turns.run()
        assert [task.error for task in tasks] == [None] * self.told.ranks
        assert all(task.is_over for task in tasks)

    def channel(self, rank: int) -> StoreChannel:
        """Return the channel of a rank."""
        return StoreChannel(self.store.of(rank), rank, world_size=self.told.ranks, timeout_s=PATIENCE_S)

    def _save(self, rank: Rank) -> None:
        self.jobs[rank.number] = SimulatedJob.of(self, rank)
        self.jobs[rank.number].run()
        rank.has_returned = True

    def write(self, number: int) -> Message:
        """Write the part of a rank."""
        work_s = self.told.work_s[number]
        if work_s is None:
            self.turns.hang()
        else:
            self.turns.sleep(work_s)
        if number in self.told.broken:
            raise CheckpointError("There is no room")
        self.attempt(number).partial.mkdir(exist_ok=True)
        self.written.add(number)
        return Message(number=4, payload=bytes(DIGEST_BYTES))

    def _abort(self, rank: Rank) -> None:
        self.turns.sleep(self.told.aborts_s[rank.number] or 0.0)
        assert rank.worker is not None
        if not rank.worker.is_over:
            error = CheckpointError("A save did not end in time")
            rank.shared.abort(error)
            rank.is_abort_certain = rank.shared.current.outcome is Outcome.FAILED


@dataclass(slots=True, kw_only=True)
class SimulatedJob(SaveJob):
    """A save whose writing follows the troubles; all the rest is the engine's."""

    number: int = 0
    attempted: Attempted | None = None

    @staticmethod
    def of(attempted: Attempted, rank: Rank) -> SimulatedJob:
        """Return the save of a rank."""
        attempt, is_local = attempted.attempt(rank.number), attempted.told.is_local
        pieces = [Piece("w", Box((rank.number,), (1,)), 0, 4)]
        if rank.number in attempted.told.odd:
            attempt, pieces = replace(attempt, layout=build_layout([ODD])), []
        channel, policy = attempted.channel(rank.number), SavePolicy(attempt.folder.root)
        return SimulatedJob(
            attempt=attempt,
            contents=Contents((), (), {}, {STATE: {"format": FORMAT, "iteration": 7}}),
            table=encode(pieces, attempt.layout),
            plan=Plan(Contents((), ()), policy, rank.number),
            plans=KnownPlans(),
            snapshot=Snapshot({}, [], arena=Arena(0, is_pinned=False), policy=policy),
            replicas=None,
            channel=channel,
            shared=rank.shared,
            retention=Retention(1 if is_local else 0),
            local_ranks=LocalRanks(channel, ()),
            report=SaveReport(7, attempt.target, 4),
            start=0.0,
            copying=NoCopies() if is_local else None,
            number=rank.number,
            attempted=attempted,
        )

    def begin(self) -> None:
        """Require no room."""

    def write(self) -> Message:
        assert self.attempted is not None
        return self.attempted.write(self.number)


def attempted(told: Troubles) -> Attempted:
    """Let an attempt happen, and hold it to what is promised whatever happens."""
    with tempfile.TemporaryDirectory() as root:
        found = Attempted(told, Path(root))
        found.run()
        is_committed = found.is_committed
        assert found.disks[0].commits == is_committed
        if any(disk.commits for disk in found.disks):
            assert not told.odd & set(range(told.ranks))
            assert is_committed
        assert not any(disk.has_committed_wrongly for disk in found.disks)
        for rank in found.ranks:
            assert rank.worker is not None
            outcome = rank.shared.current.outcome
            if rank.has_returned or outcome is Outcome.COMMITTED:
                # A rank that hears nothing may look just before what is not durable is taken back.
                assert is_committed or (rank.number > 0 and found.disks[0].is_taken_back and not told.are_messages_safe)
                if rank.number in told.leaders:
                    assert found.attempt(rank.number).is_committed()
            if rank.is_abort_certain or outcome is Outcome.FAILED:
                assert not is_committed
            for task in (rank.worker, rank.main):
                assert task is None or task.is_over or task.is_held, f"{task.name} has not ended"
            if rank.worker.is_over:
                assert rank.shared.current.stage is Action.END
                assert rank.has_returned == (outcome is Outcome.COMMITTED)
                assert rank.has_returned or isinstance(rank.worker.error, TrainerError)
            assert rank.main is None or rank.main.error is None or rank.main.is_held
        if told.are_messages_safe:
            require_the_outcome_on_every_rank(found)
        if told.is_local:
            require_one_outcome_after_restart(found, is_committed=is_committed)
        return found


def require_the_outcome_on_every_rank(found: Attempted) -> None:
    """Where all messages arrive, no rank is in doubt, and only what fails or is aborted is not committed."""
    told, is_committed = found.told, found.is_committed
    expected = [Outcome.COMMITTED if is_committed else Outcome.FAILED] * told.ranks
    for host, leader in enumerate(told.leaders):
        if is_committed and host > 0 and told.fails_to_rename(host):  # it completes its folder at the next start
            expected[leader] = Outcome.UNKNOWN
    assert outcomes(found) == expected
    if told.aborts_s == (None,) * told.ranks:
        is_good = (told.broken | told.odd).isdisjoint(range(told.ranks))
        assert is_committed == (is_good and not told.fails_to_rename(0))


def require_one_outcome_after_restart(found: Attempted, *, is_committed: bool) -> None:
    """Start again: every host has the checkpoint of the attempt, or none has and the one before is untouched."""
    for leader in found.told.leaders[1:]:
        attempt, outcome = found.attempt(leader), found.ranks[leader].shared.current.outcome
        if is_committed and outcome is not Outcome.FAILED:  # also in doubt, or dead
            path = attempt.folder.iteration(7)
            assert attempt_of(path if path.exists() else attempt.partial) == attempt.name
    found.restart()
    for attempt in found.attempts:
        there = {number: attempt_of(attempt.folder.iteration(number)) for number in attempt.folder.committed()}
        assert there.get(7) == ("n-1" if is_committed else None)
        assert is_committed or there == {6: "n-0"}
        assert {path.name for path in attempt.folder.root.iterdir() if path.is_dir()} == {
            f"iter_{number:07d}" for number in there
        }


@given(troubles())
@examples(400)
def test_no_rank_contradicts_the_folder_and_all_end(told: Troubles) -> None:
    attempted(told)


def calm(ranks: int, **changes: object) -> Troubles:
    """Return an attempt in which nothing happens but the changes."""
    told = dict[str, object](
        ranks=ranks,
        seed=1,
        work_s=(0.01,) * ranks,
        disk_s=0.005,
        broken=frozenset(),
        aborts_s=(None,) * ranks,
        renames=True,
        syncs=True,
        takes_back=True,
        odd=frozenset(),
        faults={},
        stops_at=None,
        dies_at=None,
    )
    return Troubles(**{**told, **changes})  # type: ignore[arg-type]


def outcomes(found: Attempted) -> list[Outcome | None]:
    return [rank.shared.current.outcome for rank in found.ranks]


@pytest.mark.parametrize("leaders", HOSTS)
@pytest.mark.parametrize(
    "refusals", [(), ("renames",), ("syncs",), ("syncs", "takes_back")], ids=lambda refusals: "+".join(refusals)
)
def test_what_a_disk_refuses_is_one_thing_to_all_ranks(leaders: tuple[int, ...], refusals: tuple[str, ...]) -> None:
    for host in range(len(leaders)):
        attempted(calm(3, leaders=leaders, bad_hosts={host}, **dict.fromkeys(refusals, False)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"odd": {1}}, "ranks 0, 2 against rank 1"),
        ({"odd": {1, 2}}, "rank 0 against ranks 1, 2"),
        ({"odd": {2}}, "ranks 0, 1 against rank 2"),
        *(({"broken": {rank}}, "There is no room") for rank in range(3)),
    ],
    ids=str,
)
def test_what_fails_on_a_rank_is_named_on_every_rank(changes: dict[str, object], text: str) -> None:
    attempt = attempted(calm(3, **changes))
    assert all(rank.worker is not None and text in str(rank.worker.error) for rank in attempt.ranks)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("leaders", [(0,), (0, 1)])
def test_no_single_fault_makes_a_rank_contradict_the_folder(leaders: tuple[int, ...], step: int) -> None:
    calls = range(1, 20 if leaders == (0,) else 40)
    faults = [{"faults": {(rank, call): fault}} for rank, call, fault in itertools.product((0, 1), calls, Fault)]
    ends_of_the_store = [{name: call} for name in ("stops_at", "dies_at") for call in range(1, 2 * calls.stop)]
    for changes in [*faults, *ends_of_the_store][::step]:
        attempted(calm(2, leaders=leaders, **changes))


class SavedEarlier(Attempted):
    """An attempt of ranks in doubt, of whose iteration rank 0 has the checkpoint of an earlier attempt."""

    def _save(self, rank: Rank) -> None:
        if rank.number == 0:
            self.turns.sleep(self.told.work_s[0] or 0.0)
            rank.shared.decide(Message(number=7))
        else:
            super()._save(rank)


@pytest.mark.parametrize("work_s", [0.0, 0.01, 0.035])
def test_what_rank_0_never_reads_counts_as_sent_to_nobody(work_s: float, tmp_path: Path) -> None:
    found = SavedEarlier(calm(3, work_s=(work_s, 0.01, 0.02)), tmp_path)
    found.run()
    assert outcomes(found)[1:] == [Outcome.COMMITTED] * 2
    for number, job in found.jobs.items():
        assert job.plans.offer(job.table).payload
        assert not found.channel(0).has([f"save/n-1/report/{number}"])


EVENTS: st.SearchStrategy[Event] = st.sampled_from(
    [
        *Action,
        commit_state.Failed("no room"),
        commit_state.AskedToPrepare(),
        commit_state.Decision(None),
        commit_state.Decision("no room"),
        commit_state.Silence("nothing came"),
        commit_state.Aborted("time is over"),
    ]
)


@given(st.integers(0, MOST_RANKS - 1), st.sampled_from(HOSTS), st.lists(EVENTS, max_size=30))
@example(
    rank=1,
    leaders=(0, 1),
    events=[
        Action.WRITE,
        Action.REPORT,
        commit_state.AskedToPrepare(),
        commit_state.Failed("no room"),
        commit_state.Decision(None),
    ],
)
@examples(1000)
def test_no_order_of_events_renames_twice_or_wrongly(rank: int, leaders: tuple[int, ...], events: list[Event]) -> None:
    known, whole, prepared, renames = CommitState(rank in leaders[1:], rank == 0), set[int](), set[int](), 0
    is_decided = False  # on another leader: whether rank 0 has decided to commit
    for event in events:
        before = known
        ended, _ = commit_state.advance(before, commit_state.Aborted("time is over"))
        assert commit_state.advance(ended, commit_state.Aborted("again")) == (ended, Action.NOTHING)
        known, action = commit_state.advance(known, event)
        match before.stage, event:
            case Action.WRITE, Action.WRITE:
                whole.add(rank)
            case Action.COLLECT, Action.COLLECT:
                whole |= {*range(1, MOST_RANKS)}
            case Action.PREPARE, Action.PREPARE:
                prepared.add(rank)
            case Action.AWAIT_LEADERS, Action.AWAIT_LEADERS:
                prepared |= {*leaders[1:]}
            case Action.AWAIT_ORDER, commit_state.Decision(None):
                is_decided = True
        if action is Action.RENAME:
            renames += 1
            assert rank in leaders
            assert before.outcome is None
            if rank == 0:
                assert whole == set(range(MOST_RANKS))
                assert prepared >= set(leaders)
            else:
                assert rank in prepared
                assert is_decided
        assert renames <= 1
        if action is Action.PREPARE:
            assert rank in leaders
            assert rank in whole
        if action is Action.ANSWER:
            assert rank in leaders[1:]
        if before.outcome is not None:  # what is decided stays
            assert known.outcome is before.outcome
        if before.stage is Action.END:
            assert known == before
            assert action is (Action.NOTHING if isinstance(event, commit_state.Aborted) else Action.END)
        if known.outcome is Outcome.COMMITTED and rank == 0:
            assert renames == 1
        if known.outcome is Outcome.COMMITTED and before.outcome is None and rank in leaders[1:]:  # its folder is there
            assert event in (Action.RENAME, Action.LOOK)
        if known.outcome is Outcome.FAILED and rank in leaders:  # its partial folder is removed
            assert not is_decided
        if known.stage is Action.END:
            assert known.outcome is not None
