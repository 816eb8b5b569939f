"""A save's two-phase commit: the ranks turn their files into one checkpoint, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from reprise.commit import commit_state
from reprise.commit.attempt import Attempt, SharedCommitState, key_of
from reprise.commit.commit_state import Action, Event, Outcome
from reprise.commit.joint_plan import JointPlan, KnownPlans
from reprise.commit.messages import (
    DecisionMessage,
    OpeningMessage,
    broadcast,
    is_committed,
    put_opening,
    refuse_opening,
)
from reprise.commit.replicas import ReplicaDigests, differing_sides, require_agreement
from reprise.commit.report import Offer, RankReport, require_readiness
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format.manifest import TensorEntry, Written
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem

T = TypeVar("T")

# Work on a rank's disk: any error there fails the attempt, and so does a failed message.
_ON_DISK = (Action.WRITE, Action.PREPARE, Action.RENAME)


class Steps(Protocol):
    """A rank's disk work in a commit. Each method raises its own failure."""

    @property
    def replicas(self) -> ReplicaDigests:
        """Return digests for the boxes that this rank compares with other ranks."""

    def table(self) -> bytes:
        """Return this rank's piece table; see `joint_plan.encode`."""

    def view(self) -> int:
        """Return the checkpoint folder's identity on this host. Called only with several ranks."""

    def begin(self) -> None:
        """Prepare the save before any rank writes. Rank 0 only."""

    def write(self) -> Written:
        """Write this rank's part durably."""

    def json_files(self, tensors: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Return the checkpoint's JSON files. Rank 0 only."""

    def prepare(self, files: Mapping[str, bytes], views: Mapping[int, int]) -> None:
        """Write the JSON files into the folder, and make the folder durable. Leaders only.

        Args:
            views: How other writing ranks identify the folder, each identity with its first rank.
        """

    def rename(self) -> None:
        """Rename the folder to its final name. Leaders only."""


class TwoPhaseCommit:
    """One rank's side in committing an attempt: rank 0 coordinates, the others participate. Runs on a worker thread.

    `commit_state.advance` alone decides the next action. A call may return its result as an event.

    Args:
        shared: The attempt's state on this rank. Another thread may `abort` on it meanwhile.
        steps: This rank's disk work.
        plans: Plans from earlier attempts in this rank's run.
    """

    def __init__(
        self,
        channel: StoreChannel,
        attempt: Attempt,
        shared: SharedCommitState,
        steps: Steps,
        plans: KnownPlans,
    ) -> None:
        self._channel, self._attempt, self._shared = channel, attempt, shared
        self._steps, self._plans = steps, plans
        self._key = key_of(attempt.name)
        self._error: BaseException | None = None  # this rank's
        self._report = RankReport()
        # On rank 0, by rank:
        self._offers: dict[int, Offer] = {}
        self._reports: dict[int, RankReport] = {}
        self._plan: JointPlan | None = None

    def run(self) -> None:
        """Make the checkpoint, or learn that the attempt failed.

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
            action = self._shared.take(event)
        state = self._shared.current
        if state.outcome is not Outcome.COMMITTED:
            raise self._error or CheckpointError(str(state.problem).rstrip("."))

    def _calls(self) -> dict[Action, Callable[[], Event | None]]:
        """Return the call for each action. Storing them would keep this object alive, and with it the folder lock."""
        return {
            Action.WRITE: self._write,
            Action.REPORT: self._send_report,
            Action.AWAIT_DECISION: self._await_decision,
            Action.LOOK: self._look,
            Action.COLLECT: self._collect,
            Action.PREPARE: self._prepare,
            Action.RENAME: self._rename,
            Action.BROADCAST: self._broadcast,
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
        written = self._steps.write()
        digests = b"".join(piece.digests for piece in written.pieces)
        self._report = RankReport(None, written.total_bytes, digests)
        self._reports = {self._channel.rank: self._report}  # complete with a single rank
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
        channel, offer = self._channel, Offer(self._attempt.iteration)
        try:
            if channel.world_size > 1:
                offer = replace(offer, groups=self._steps.replicas.groups(), view=self._steps.view())
            offer = self._plans.with_table(offer, self._steps.table())
            if channel.coordinates:
                self._lead(offer)
                return True
        except BaseException as error:
            refuse_opening(channel, self._attempt, error)
            raise
        return self._join(offer)

    def _lead(self, offer: Offer) -> None:
        """Read all ranks' offers, and open the attempt. Rank 0 only."""
        self._offers = {self._channel.rank: offer, **self._read_all("offer", Offer.from_bytes)}
        require_readiness(self._offers)
        self._plan = self._plans.joint(self._attempt.layout, self._offers)
        sides = differing_sides({rank: offer.groups for rank, offer in self._offers.items()})
        if sides:
            message = OpeningMessage(sides=sides)
            self._channel.put(f"{self._key}/opened", message.to_bytes(), is_first=False)
        require_agreement(self._channel, self._key, sides, self._steps.replicas.table)
        self._begin()
        self._plans.delivered()
        put_opening(self._channel, self._attempt.name, OpeningMessage())

    def _join(self, offer: Offer) -> bool:
        """Send this rank's offer, and wait until it may write. Any rank but rank 0."""
        self._channel.put(f"{self._key}/offer/{self._channel.rank}", offer.to_bytes())
        answer = OpeningMessage.from_bytes(self._channel.read(f"{self._key}/opened", sender=self._coordinator))
        require_agreement(self._channel, self._key, answer.sides, self._steps.replicas.table)
        if answer.problem is not None:
            raise CheckpointError(answer.problem.rstrip("."))
        if not answer.is_decided:
            self._plans.delivered()
        return not answer.is_decided

    def _begin(self) -> None:
        """Prepare the save before any rank writes. Rank 0 only."""
        self._steps.begin()

    def _read_all(self, kind: str, parse: Callable[[bytes], T], ranks: Sequence[int] | None = None) -> dict[int, T]:
        """Read one kind of message from ranks, by default all others. Each rank deletes its own after the attempt."""
        ranks = self._channel.ranks[1:] if ranks is None else ranks
        messages = self._channel.read_all({f"{self._key}/{kind}/{rank}": f"rank {rank}" for rank in ranks})
        return dict(zip(ranks, map(parse, messages), strict=True))

    def _send_report(self) -> None:
        self._channel.put(f"{self._key}/report/{self._channel.rank}", self._report.to_bytes())

    def _await_decision(self) -> Event:
        message = self._channel.read(f"{self._key}/decision", sender=self._coordinator)
        return self._decided(DecisionMessage.from_bytes(message))

    def _decided(self, decision: DecisionMessage) -> Event:
        """Return the event for a decision on this attempt."""
        if decision.problem is not None:
            return commit_state.Decision(decision.problem.rstrip("."))
        iteration = self._attempt.iteration
        if decision.iteration != iteration:
            return commit_state.Decision(
                f"{self._coordinator.capitalize()} saved iteration {decision.iteration}, this rank {iteration}"
            )
        return commit_state.Decision(None, decision.is_earlier)

    def _look(self) -> Event:
        return commit_state.Looked(is_committed(self._attempt))

    def _collect(self) -> Event:
        reports = self._read_all("report", RankReport.from_bytes)
        self._reports = {self._channel.rank: self._report, **reports}
        problems = (f"Rank {rank}: {report.problem}" for rank, report in reports.items() if report.problem is not None)
        return commit_state.Arrived(frozenset(reports), next(problems, None))

    def _prepare(self) -> None:
        self._steps.prepare(self._steps.json_files(self._tensors()), self._views())

    def _views(self) -> dict[int, int]:
        """Return how other ranks identify the folder, each identity with its first rank. Rank 0 only."""
        views = dict[int, int]()
        for rank, offer in self._offers.items():
            if rank != self._channel.rank:
                views.setdefault(offer.view, rank)
        return views

    def _tensors(self) -> Mapping[str, TensorEntry]:
        """Return the checkpoint's tensors. Rank 0 only.

        Raises:
            CheckpointError: A rank relied on another to write its bytes, which did not.
        """
        written_bytes = sum(report.written_bytes for report in self._reports.values())
        expected = sum(place.spec.total_bytes for place in self._attempt.layout.places.values())
        if written_bytes != expected:
            raise CheckpointError(
                "The ranks have not written every byte once",
                expected=f"{expected} B of tensors",
                found=f"{written_bytes} B",
                fix="Nothing was committed; this is a defect of the program that wrote them.",
            )
        assert self._plan is not None
        return self._plan.tensors([report.digests for report in self._reports.values()])

    def _rename(self) -> None:
        self._steps.rename()

    def _broadcast(self) -> None:
        broadcast(self._channel, self._key, self._decision())

    def _decision(self) -> DecisionMessage:
        """Return rank 0's decision message."""
        state = self._shared.current
        if state.outcome is Outcome.COMMITTED:
            return DecisionMessage(iteration=self._attempt.iteration)
        return DecisionMessage(problem=str(state.problem))

    @property
    def _coordinator(self) -> str:
        return f"rank {self._channel.coordinator}"
