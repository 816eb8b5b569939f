"""A save's two-phase commit: the ranks turn their files into one checkpoint, or none.

Hosts with own folders first prepare all folders, then rename them, rank 0's before the others. Rank 0 sends all JSON
files to the other hosts' leaders, and waits until every folder is prepared. They rename on its decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from reprise.commit import commit_state, finish
from reprise.commit.attempt import Attempt, Copying
from reprise.commit.commit_state import Action, Event, Outcome
from reprise.commit.joint_plan import JointPlan, KnownPlans
from reprise.commit.messages import Message, pack_files, unpack_files
from reprise.commit.replicas import ReplicaDigests, differing_sides, raise_difference
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format import host_file, manifest
from reprise.format.host_file import HostFile
from reprise.format.manifest import TensorEntry
from reprise.format.names import HOST, MANIFEST
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.storage.lock import FolderLock
from reprise.tensors.live import Contents

# Work on a rank's disk: any error there fails the attempt, and so does a failed message.
_ON_DISK = (Action.WRITE, Action.PREPARE, Action.RENAME)


@dataclass(slots=True, kw_only=True)
class TwoPhaseCommit(ABC):
    """One rank's side in committing an attempt: rank 0 coordinates, the others participate. Runs on a worker thread.

    `commit_state.advance` alone decides the next action. A call may return its result as an event.

    Args:
        table: The pieces that this rank writes; see `joint_plan.encode`.
        replicas: Digests of tensors to compare with other ranks. None if there are none, or not in this save.
        channel: The worker thread's channel.
        shared: The attempt's state on this rank. Another thread may abort it meanwhile.
        plans: Plans from earlier attempts in this rank's run.
        lock: The folder's lock, on leaders.
        copying: The copies of local checkpoints, if each host has its own folder. None for a shared folder.

    Attributes:
        is_durable: Whether this rank has made the checkpoint's name durable. Only on leaders.
    """

    attempt: Attempt
    contents: Contents
    table: bytes
    replicas: ReplicaDigests | None
    channel: StoreChannel
    shared: SharedAttempt
    plans: KnownPlans
    lock: FolderLock | None = None
    copying: Copying | None = None
    is_durable: bool = False
    _error: BaseException | None = None  # this rank's
    _report: Message = Message()  # noqa: RUF009 - frozen
    _files: bytes = b""  # packed, on another host's leader
    _order: bytes = b""  # for the copies
    # On rank 0, by rank:
    _reports: dict[int, Message] = field(default_factory=dict)
    _statuses: dict[int, bytes] = field(default_factory=dict)
    _plan: JointPlan | None = None

    @abstractmethod
    def begin(self) -> None:
        """Make the partial folder before any rank writes. Leaders only."""

    @abstractmethod
    def write(self) -> Message:
        """Write this rank's part durably."""

    @property
    def leads(self) -> bool:
        """Return whether this rank is a leader, which alone changes names in its host's folder."""
        return self.channel.rank in self.attempt.hosts.leaders

    def commit(self) -> None:
        """Make the checkpoint, and start its copies, or learn that the attempt failed.

        Raises:
            ReplicaError: Ranks hold different bits for the same tensor. Raised on rank 0.
            TrainerError: The attempt did not become a checkpoint. Raised on every rank.
            BaseException: The failed rank's own error. The others get a CheckpointError with that rank's number.
        """
        action = Action.WRITE
        while action not in (Action.END, Action.NOTHING):
            try:
                event = self._calls()[action]() or action
            except BaseException as error:  # noqa: BLE001 - raised again once the peers know
                event = self._failure(error, is_silence=isinstance(error, LaunchError) and action not in _ON_DISK)
            action = self.shared.take(event)
        state = self.shared.current
        if state.outcome is not Outcome.COMMITTED:
            raise self._error or CheckpointError(str(state.problem).rstrip("."))
        if self.copying is not None and self.leads:
            self.copying.committed(self.attempt, self._order)

    def _calls(self) -> dict[Action, Callable[[], Event | None]]:
        """Return the call for each action. Storing them would keep this object alive, and with it the folder lock."""
        return {
            Action.WRITE: self._write,
            Action.REPORT: lambda: self.shared.put("report", self._report),
            Action.AWAIT_DECISION: self._await_decision,
            Action.AWAIT_ORDER: self._read_decision,
            Action.LOOK: self._look,
            Action.COLLECT: self._collect,
            Action.PREPARE: self._prepare,
            Action.ANSWER: self._answer,
            Action.AWAIT_LEADERS: self._await_leaders,
            Action.RENAME: self._rename,
            Action.BROADCAST: lambda: self.shared.decide(self._decision()),
        }

    def _failure(self, error: BaseException, *, is_silence: bool) -> Event:
        if is_silence:
            self._error = self._error or error
            return commit_state.Silence(str(error))
        # A disagreement between ranks says more than this rank's own error, unless that one is unexpected.
        is_better = isinstance(error, TrainerError) and isinstance(self._error, TrainerError)
        self._error = error if is_better else self._error or error
        self._report = replace(self._report, problem=str(as_problem(error)))
        return commit_state.Failed(str(as_problem(error)))

    def _write(self) -> Event | None:
        try:
            if not self._open():
                return None  # the decision is there
        except LaunchError as error:
            return self._failure(error, is_silence=True)
        self._report = self.write()
        self._reports[self.channel.rank] = self._report
        return None

    def _open(self) -> bool:
        """Agree with all ranks on what to save, before writing a byte.

        Returns:
            False if rank 0 has decided the attempt already.

        Raises:
            CheckpointError: The ranks save different tensors or iterations, or a rank saves nothing.
            ReplicaError: They hold different bits for the same tensor. Raised on rank 0.
            LaunchError: A rank does not answer.
        """
        attempt, channel = self.attempt, self.channel
        try:
            if self.leads and not channel.coordinates:
                self.begin()
            offer = self.plans.offer(self.table, () if self.replicas is None else self.replicas.groups())
            if channel.coordinates:
                self._lead(offer)
                return True
        except BaseException as error:
            self.shared.refuse(error)
            raise
        self.shared.put("offer", offer)
        answer = self.shared.read("opened", channel.coordinator)
        if answer.groups:
            raise_difference(channel, self.shared.key, answer.groups, self.replicas)
        if answer.problem is not None:
            raise CheckpointError(answer.problem.rstrip("."))
        if answer.number is None:
            return False
        if answer.number != attempt.iteration:
            raise CheckpointError(
                "The ranks save different iterations",
                expected=f"iteration {answer.number}, as on rank {channel.coordinator}",
                found=f"iteration {attempt.iteration}",
                fix="Nothing was saved. Give all ranks the same iteration.",
            )
        self.plans.delivered(offer)
        return True

    def _lead(self, offer: Message) -> None:
        """Read all ranks' offers, and open the attempt. Rank 0 only."""
        channel, shared = self.channel, self.shared
        offers = {channel.rank: offer, **shared.read_all("offer", channel.ranks[1:])}
        if (problem := _first_problem(offers)) is not None:
            raise CheckpointError(problem.rstrip("."))
        self._plan = self.plans.joint(self.attempt.layout, offers)
        compared = {rank: offer.groups for rank, offer in offers.items() if offer.groups}
        if compared and (sides := differing_sides(compared)):
            shared.put("opened", Message(groups=sides), is_first=False)
            raise_difference(channel, shared.key, sides, self.replicas)
        self.begin()
        self.plans.delivered(offer)
        shared.post("opened", Message(number=self.attempt.iteration))

    def _await_decision(self) -> Event:
        """Wait for rank 0's decision or, on another host's leader, the files that it asks to prepare."""
        if self.shared.current.leads:
            self._files = self.shared.read("files", self.channel.coordinator).payload
            if self._files:
                return commit_state.AskedToPrepare()
        return self._read_decision()

    def _read_decision(self) -> Event:
        coordinator, iteration = self.channel.coordinator, self.attempt.iteration
        decision = self.shared.read("decision", coordinator)
        self._order, problem = decision.payload, decision.problem
        if problem is None and decision.number != iteration:
            problem = f"Rank {coordinator} saved iteration {decision.number}, this rank {iteration}"
        return commit_state.Decision(None if problem is None else problem.rstrip("."))

    def _look(self) -> Event | None:
        return None if self.attempt.is_committed() else commit_state.Failed("there is no checkpoint")

    def _collect(self) -> Event | None:
        self._reports |= self.shared.read_all("report", self.channel.ranks[1:])
        return _failed(_first_problem(self._reports))

    def _prepare(self) -> None:
        finish.prepare(self.attempt, self._json_files(), lock=self.lock, beside=self.contents.syncs)

    def _json_files(self) -> dict[str, bytes]:
        """Return the JSON files for this host's folder."""
        channel, attempt, contents = self.channel, self.attempt, self.contents
        if channel.coordinates:
            tensors = self._tensors()
            files = finish.json_files(attempt, tensors, documents=contents.documents, aliases=contents.aliases)
            if self.copying is None:
                return files
            files = self._with_host_file(files)
            if len(attempt.hosts.leaders) > 1:
                self.shared.put("files", Message(payload=pack_files(files)))
        else:
            files = unpack_files(self._files)
        return of_host(files, attempt.hosts.number_of(channel.rank))

    def _tensors(self) -> Mapping[str, TensorEntry]:
        """Return the checkpoint's tensors. Rank 0 only.

        Raises:
            CheckpointError: A rank relied on another to write its bytes, which did not.
        """
        written_bytes = sum(report.number or 0 for report in self._reports.values())
        expected = sum(place.spec.total_bytes for place in self.attempt.layout.places.values())
        if written_bytes != expected:
            raise CheckpointError(
                "The ranks have not written every byte once",
                expected=f"{expected} B of tensors",
                found=f"{written_bytes} B",
                fix="Nothing was committed; this is a defect of the program that wrote them.",
            )
        assert self._plan is not None
        return self._plan.tensors([report.payload for report in self._reports.values()])

    def _with_host_file(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the JSON files followed by `host.json` for rank 0's host."""
        hosts = self.attempt.hosts
        assert self._plan is not None
        host_of = {rank: number for number, ranks in enumerate(hosts.ranks) for rank in ranks}
        host_of_table = [host_of[rank] for rank in self._reports]
        writers = {name: tuple(host_of_table[n] for n in tables) for name, tables in self._plan.writers.items()}
        digest = manifest.digest_of(files[MANIFEST])
        return {**files, HOST: HostFile(self.attempt.name, digest, 0, hosts.names, writers, {}).to_bytes()}

    def _answer(self) -> None:
        assert self.copying is not None
        problem = self.shared.current.problem
        status = b"" if problem is not None else self.copying.status(self.attempt.iteration)
        self.shared.put("prepared", Message(problem=problem, payload=status))

    def _await_leaders(self) -> Event | None:
        answers = self.shared.read_all("prepared", self.attempt.hosts.leaders[1:])
        self._statuses |= {leader: answer.payload for leader, answer in answers.items()}
        return _failed(_first_problem(answers))

    def _rename(self) -> None:
        self.is_durable = finish.rename(self.attempt)

    def _decision(self) -> Message:
        """Return rank 0's decision, with the order for the copies."""
        state, iteration = self.shared.current, self.attempt.iteration
        if state.outcome is not Outcome.COMMITTED:
            return Message(problem=str(state.problem))
        if self.copying is not None:
            self._statuses[self.channel.rank] = self.copying.status(iteration)
            self._order = self.copying.decide([self._statuses[rank] for rank in self.attempt.hosts.leaders])
        return Message(number=iteration, payload=self._order)


def _first_problem(messages: Mapping[int, Message]) -> str | None:
    """Return the first failed rank's problem with the rank's number, given the messages by rank. None without one."""
    problems = (f"Rank {rank}: {each.problem}" for rank, each in messages.items() if each.problem is not None)
    return next(problems, None)


def _failed(problem: str | None) -> Event | None:
    """Return the event for a failed rank's problem, if there is one."""
    return None if problem is None else commit_state.Failed(problem)


def of_host(files: Mapping[str, bytes], host: int) -> dict[str, bytes]:
    """Return rank 0's JSON files for the host with this number: `host.json` lists its ranks' pieces."""
    record = host_file.from_bytes(files[HOST], where=HOST)
    record = replace(record, host=host, held=record.written_by(host))
    names = {name: host_file.stored_name(name, is_whole=record.is_whole) for name in files}
    return {names[name]: data for name, data in {**files, HOST: record.to_bytes()}.items()}
