"""The two-phase commit of a save: the ranks turn the files that they wrote into one checkpoint, or into none.

Where each host has a folder of its own, rank 0 sends the other leaders all JSON files, waits until every folder is
prepared, and renames its own; the decision lets the others rename theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from reprise.commit import commit_state, disagreement
from reprise.commit.attempt import Attempt, Copying, SharedCommitState
from reprise.commit.channel import StoreChannel
from reprise.commit.commit_state import Action, Event, Outcome
from reprise.commit.file_exchange import FileExchange
from reprise.commit.inventory import Inventory
from reprise.commit.messages import FAILED, OK, broadcast, is_committed, key_of, marked_key, text_of
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format.manifest import Written, WrittenPiece
from reprise.format.report import RankReport, decode, encode

# The first two bytes of a decision that names ranks that are to send their tables; the last decision comes later.
_ASK = b"??"


class TwoPhaseCommit:
    """One rank's side of the commit of one attempt: rank 0 coordinates, the others participate. Worker thread.

    Its methods are the steps, in the order in which `SaveJob.run` takes them. Each does nothing where the attempt has
    failed before it, or where it is not for this rank: `commit_state.advance` alone decides that.

    Args:
        inventory: what this rank saves; complete once its part is written.
        shared: of this attempt on this rank; another thread may `abort` on it meanwhile.
        exchange: the JSON files that leaders have from earlier saves.
        copying: what the copies of local checkpoints add to the messages; None for none.
    """

    def __init__(
        self,
        channel: StoreChannel,
        attempt: Attempt,
        inventory: Inventory,
        shared: SharedCommitState,
        *,
        exchange: FileExchange | None = None,
        copying: Copying | None = None,
    ) -> None:
        self._channel, self._attempt, self._inventory, self._shared = channel, attempt, inventory, shared
        self._exchange, self._copying = exchange or FileExchange(), copying
        self._statuses: dict[int, bytes] = {}
        self._order = b""
        self._key = key_of(attempt.name)
        self._action = Action.NOTHING
        self._error: BaseException | None = None  # the first of this rank
        self._report = RankReport(attempt.iteration, inventory.identity)
        self._reports: list[RankReport] = []
        # On rank 0: whether every rank is past the attempts before this one, or has aborted them.
        self.has_all_reports = channel.world_size == 1

    @contextlib.contextmanager
    def failing_on_error(self) -> Iterator[None]:
        """Let an error fail the attempt; `end` raises it once the other ranks know."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again once the peers know
            self._error = error
            self._report = replace(self._report, problem=text_of(error))
            self._take(commit_state.Failed(text_of(error)))

    def wrote(self, written: Written) -> None:
        """Note that this rank's part is durable."""
        self._report = replace(
            self._report,
            groups=self._inventory.groups(),
            written_bytes=written.total_bytes,
            pieces=encode(written.pieces, self._attempt.layout),
        )
        self._reports = [self._report]  # all there are, where there is one rank
        self._take(commit_state.Wrote())

    def vote(self) -> None:
        """Report this rank's part. Rank 0 waits for all reports, the others for its decision.

        The leader of another host may be asked to prepare its folder first.
        """
        try:
            if self._action is Action.COLLECT:
                self._collect()
            if self._action is Action.REPORT:
                self._channel.put(f"{self._key}/report/{self._channel.rank}", self._report.to_bytes())
                self._take(commit_state.ReportStored())
            if self._action is Action.AWAIT_DECISION:
                self._take(self._await_request())
        except LaunchError as error:
            self._fall_silent(error)
        self._look()

    @property
    def is_to_prepare(self) -> bool:
        """Return whether all ranks have written their parts and this one, a leader, prepares its host's folder."""
        return self._action is Action.PREPARE

    @property
    def may_rename(self) -> bool:
        """Return whether this rank, a leader, is to rename its host's folder."""
        return self._action is Action.RENAME

    def send(self, files: Mapping[str, bytes]) -> None:
        """Send the JSON files of the checkpoint to the leaders of the other hosts. Rank 0 only."""
        if len(self._attempt.hosts.leaders) > 1:
            self._channel.put(f"{self._key}/files", self._exchange.pack(files))

    def receive(self) -> dict[str, bytes]:
        """Return the JSON files of the checkpoint, which rank 0 has sent.

        Raises:
            CheckpointError: if one of them is not known here.
        """
        return self._exchange.unpack(self._channel.read(f"{self._key}/files", sender=self._coordinator))

    def prepared(self) -> None:
        """Note that this host's folder is prepared.

        Raises:
            CheckpointError: if the attempt was aborted before.
        """
        self._take(commit_state.ReadyToRename())
        if self._action is Action.END:
            raise CheckpointError(str(self._shared.current.problem).rstrip("."))

    def decide(self) -> None:
        """Wait until every host's folder is prepared: rank 0 for the answers, the other leaders for its decision."""
        try:
            if self._action is Action.ANSWER:
                self._channel.put(f"{self._key}/prepared/{self._channel.rank}", self._answer())
                self._take(commit_state.AnswerStored())
            if self._action is Action.AWAIT_DECISION:
                self._take(self._decided(self._await_decision()))
            if self._action is Action.AWAIT_LEADERS:
                self._collect_answers()
        except LaunchError as error:
            self._fall_silent(error)
        self._look()

    def pieces(self) -> list[list[WrittenPiece]]:
        """Return the pieces of each rank. Rank 0 only.

        Raises:
            CheckpointError: if some rank has counted on another to write its bytes, which has not.
        """
        layout = self._attempt.layout
        written_bytes = sum(report.written_bytes for report in self._reports)
        expected = sum(place.spec.total_bytes for place in layout.places.values())
        if written_bytes != expected:
            raise CheckpointError(
                "The ranks have not written every byte once",
                expected=f"{expected} B of tensors",
                found=f"{written_bytes} B",
                fix="Nothing was committed; this is a defect of the program that wrote them.",
            )
        return [list(decode(report.pieces, layout)) for report in self._reports]

    def renamed(self) -> None:
        """Note that this host's folder has its final name; on rank 0, that the checkpoint exists."""
        self._take(commit_state.Renamed())
        if self._copying is not None:
            if self._channel.coordinates:
                self._statuses[0] = self._copying.status(self._attempt.iteration)
                self._order = self._copying.decide([self._statuses[rank] for rank in self._attempt.hosts.leaders])
            self._copying.committed(self._attempt, self._order)

    def broadcast(self) -> None:
        """Send the decision to all ranks. Rank 0 only."""
        if self._action is Action.BROADCAST:
            known = self._shared.current
            decision = FAILED + str(known.problem).encode()
            if known.outcome is Outcome.COMMITTED:
                decision = OK + b"%d %s" % (self._attempt.iteration, self._order)
            broadcast(self._channel, self._key, decision)
            self._take(commit_state.Broadcast())

    def end(self) -> None:
        """Return if the attempt became a checkpoint.

        Raises:
            ReplicaError: on rank 0, if ranks that hold the same tensor hold different bits of it.
            TrainerError: on every rank, if it did not become one.
            BaseException: on the rank that failed so; the others get a CheckpointError that names it.
        """
        known = self._shared.current
        if known.outcome is not Outcome.COMMITTED:
            raise self._error or CheckpointError(str(known.problem).rstrip("."))

    @property
    def _coordinator(self) -> str:
        return f"rank {self._channel.coordinator}"

    def _take(self, event: Event) -> None:
        self._action = self._shared.take(event)

    def _fall_silent(self, error: LaunchError) -> None:
        self._error = self._error or error
        self._take(commit_state.Silence(str(error)))

    def _look(self) -> None:
        if self._action is Action.LOOK:
            is_there = is_committed(self._attempt)
            self._take(commit_state.FoundCommitted() if is_there else commit_state.FoundNothing())

    def _answer(self) -> bytes:
        problem = self._shared.current.problem
        if problem is not None:
            return FAILED + problem.encode()
        return OK + (b"" if self._copying is None else self._copying.status(self._attempt.iteration))

    def _collect_answers(self) -> None:
        for leader in self._attempt.hosts.leaders[1:]:
            data = self._channel.take(f"{self._key}/prepared/{leader}", sender=f"rank {leader}")
            self._statuses[leader] = data[len(OK) :]
            problem = None if data.startswith(OK) else data[len(FAILED) :].decode()
            self._take(commit_state.AnswerArrived(leader, problem))
        self._exchange.delivered(was_taken=self._action is Action.RENAME)

    def _await_request(self) -> Event:
        """Wait for rank 0's request to prepare, on the leader of another host, or its decision."""
        if self._shared.current.leads:
            keys = [f"{self._key}/files", f"{self._key}/decision"]
            if self._channel.await_any(keys, sender=self._coordinator, check=_go_on) == keys[0]:
                return commit_state.AskedToPrepare()
        return self._decided(self._await_decision())

    def _collect(self) -> None:
        others = self._channel.ranks[1:]
        try:
            found = [self._channel.take(f"{self._key}/report/{rank}", sender=f"rank {rank}") for rank in others]
            self.has_all_reports = True
            self._channel.delete([marked_key(self._attempt, leader) for leader in self._attempt.hosts.leaders])
            self._reports = [self._report, *map(RankReport.from_bytes, found)]
            self._require_agreement()
        except LaunchError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again once the peers know
            if not (isinstance(error, TrainerError) and isinstance(self._error, TrainerError)):
                error = self._error or error
            self._error = error
            self._take(commit_state.Failed(text_of(error)))
            return
        for rank, report in zip(others, self._reports[1:], strict=True):
            self._take(commit_state.ReportArrived(rank, report.problem))

    def _require_agreement(self) -> None:
        """Refuse reports of ranks that do not save the same thing; two of them are asked for their tables.

        Raises:
            CheckpointError: naming the first differences and the ranks.
            LaunchError: if a rank does not answer.
        """
        reports = dict(sorted(zip(self._channel.ranks, self._reports, strict=True)))
        disagreement.refuse_other_iterations({rank: report.iteration for rank, report in reports.items()})
        found = disagreement.find({rank: report for rank, report in reports.items() if report.problem is None})
        if found is None:
            return
        asked = [rank for rank in found.witnesses if rank != self._channel.rank]
        self._channel.put(f"{self._key}/decision", _ASK + " ".join(map(str, asked)).encode())
        tables = {rank: self._channel.read(f"{self._key}/table/{rank}", sender=f"rank {rank}") for rank in asked}
        tables[self._channel.rank] = self._inventory.to_bytes()
        raise disagreement.explain(found, [tables[rank] for rank in found.witnesses])

    def _await_decision(self) -> bytes:
        decision = self._channel.read(f"{self._key}/decision", sender=self._coordinator)
        if not decision.startswith(_ASK):
            return decision
        if self._channel.rank in map(int, decision[len(_ASK) :].split()):
            self._channel.put(f"{self._key}/table/{self._channel.rank}", self._inventory.to_bytes())
        return self._channel.read(f"{self._key}/decision/last", sender=self._coordinator)

    def _decided(self, decision: bytes) -> Event:
        if not decision.startswith(OK):
            return commit_state.Decision(decision[len(FAILED) :].decode().rstrip("."))
        number, _, self._order = decision[len(OK) :].partition(b" ")
        iteration = int(number)
        if iteration != self._attempt.iteration:
            return commit_state.Decision(
                f"{self._coordinator.capitalize()} saved iteration {iteration}, this rank {self._attempt.iteration}"
            )
        return commit_state.Decision(None)


def _go_on() -> None:
    """Let a wait go on."""
