"""The two-phase commit of a save: the ranks turn their files into one checkpoint, or into none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from reprise.commit import commit_state, disagreement
from reprise.commit.attempt import Attempt, SharedCommitState, key_of
from reprise.commit.channel import StoreChannel
from reprise.commit.commit_state import Action, Event, Outcome
from reprise.commit.inventory import Inventory
from reprise.commit.messages import DecisionMessage, broadcast, is_committed, text_of
from reprise.commit.piece_tables import PieceTables, Tiling
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format.manifest import TensorEntry, Written
from reprise.format.report import RankReport, encode

# What a rank does on its disk: any error of it fails the attempt, also one of a message.
_ON_DISK = (Action.NOTHING, Action.PREPARE, Action.RENAME)


class Steps(Protocol):
    """What a rank does on its disk in a commit. All raise what went wrong."""

    def write(self) -> Written:
        """Write this rank's part, durably where there are other ranks."""

    def inventory(self) -> Inventory:
        """Return what this rank saves, once its part is written. Where there are several ranks."""

    def json_files(self, tensors: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Return the JSON files of the checkpoint. Rank 0 only."""

    def prepare(self, files: Mapping[str, bytes]) -> None:
        """Write the JSON files into the folder, and make all in it durable. Leaders only."""

    def rename(self) -> None:
        """Rename the folder to its final name. Leaders only."""


class TwoPhaseCommit:
    """One rank's side of the commit of one attempt: rank 0 coordinates, the others participate. Worker thread.

    `commit_state.advance` decides alone which action comes next. Each action returns its result as an event.

    Args:
        shared: of this attempt on this rank; another thread may `abort` on it meanwhile.
        steps: what this rank does on its disk.
        tables: the tables of pieces that travelled with earlier attempts of this rank's run.
    """

    def __init__(
        self,
        channel: StoreChannel,
        attempt: Attempt,
        shared: SharedCommitState,
        steps: Steps,
        tables: PieceTables,
    ) -> None:
        self._channel, self._attempt, self._shared = channel, attempt, shared
        self._steps, self._tables = steps, tables
        self._inventory: Inventory | None = None  # of this rank, once its part is written
        self._key = key_of(attempt.name)
        self._error: BaseException | None = None  # of this rank
        self._report = RankReport(attempt.iteration)
        self._reports: dict[int, RankReport] = {}  # on rank 0, by rank

    def run(self) -> None:
        """Make the checkpoint, or learn of the failed attempt.

        Raises:
            ReplicaError: on rank 0, if ranks hold different bits of the same tensor.
            TrainerError: on every rank, if the attempt did not become a checkpoint.
            BaseException: on the failed rank; the others get a CheckpointError with the number of the failed rank.
        """
        action, call = Action.NOTHING, self._write
        while True:
            try:
                event = call()
            except BaseException as error:  # noqa: BLE001 - raised again once the peers know
                event = self._failure(error, is_silence=isinstance(error, LaunchError) and action not in _ON_DISK)
            action = self._shared.take(event)
            if action in (Action.END, Action.NOTHING):
                break
            call = self._calls()[action]
        state = self._shared.current
        self._tables.ended(is_committed=state.made_checkpoint)
        if state.outcome is not Outcome.COMMITTED:
            raise self._error or CheckpointError(str(state.problem).rstrip("."))

    def _calls(self) -> dict[Action, Callable[[], Event]]:
        """Return the call of each action. Kept, they would keep this object, and with it the lock of the folder."""
        return {
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
        # A disagreement of the ranks says more than this rank's own error, but for one that nobody expects.
        is_better = isinstance(error, TrainerError) and isinstance(self._error, TrainerError)
        self._error = error if is_better else self._error or error
        self._report = replace(self._report, problem=text_of(error))
        return commit_state.Failed(text_of(error))

    def _write(self) -> Event:
        written = self._steps.write()
        digests = b"".join(piece.digests for piece in written.pieces)
        report = replace(self._report, written_bytes=written.total_bytes, digests=digests)
        self._report = self._tables.pack(report, encode(written.pieces, self._attempt.layout))
        if self._channel.world_size > 1:
            self._inventory = self._steps.inventory()
            identity, groups = self._inventory.identity, self._inventory.groups()
            self._report = replace(self._report, identity=identity, groups=groups)
        self._reports = {self._channel.rank: self._report}  # all there are, where there is one rank
        return commit_state.Wrote()

    def _send_report(self) -> Event:
        self._channel.put(f"{self._key}/report/{self._channel.rank}", self._report.to_bytes())
        return commit_state.ReportStored()

    def _await_decision(self) -> Event:
        decision = self._read_decision("decision")
        if decision.witnesses is not None:
            if self._channel.rank in decision.witnesses:
                self._channel.put(f"{self._key}/table/{self._channel.rank}", self._table())
            decision = self._read_decision("decision/last")
        return self._decided(decision)

    def _decided(self, decision: DecisionMessage) -> Event:
        """Return the event of a decision on this attempt."""
        if decision.problem is not None:
            return commit_state.Decision(decision.problem.rstrip("."))
        iteration = self._attempt.iteration
        if decision.iteration != iteration:
            return commit_state.Decision(
                f"{self._coordinator.capitalize()} saved iteration {decision.iteration}, this rank {iteration}"
            )
        return commit_state.Decision(None, decision.is_earlier)

    def _look(self) -> Event:
        return commit_state.FoundCommitted() if is_committed(self._attempt) else commit_state.FoundNothing()

    def _collect(self) -> Event:
        """Read the reports of all ranks, each deleted by its rank after the attempt."""
        ranks = self._channel.ranks[1:]
        messages = self._channel.read_all({f"{self._key}/report/{rank}": f"rank {rank}" for rank in ranks})
        reports = dict(zip(ranks, map(RankReport.from_bytes, messages), strict=True))
        self._reports = {self._channel.rank: self._report, **reports}
        self._require_agreement()
        problems = (f"Rank {rank}: {report.problem}" for rank, report in reports.items() if report.problem is not None)
        return commit_state.ReportsArrived(frozenset(ranks), next(problems, None))

    def _require_agreement(self) -> None:
        """Refuse reports of ranks with different contents to save; two of them send their tables.

        Raises:
            CheckpointError: naming the first differences and the ranks.
            LaunchError: if a rank does not answer.
        """
        reports = dict(sorted(self._reports.items()))
        disagreement.refuse_other_iterations({rank: report.iteration for rank, report in reports.items()})
        difference = disagreement.find({rank: report for rank, report in reports.items() if report.problem is None})
        if difference is None:
            return
        witnesses = [rank for rank in difference.witnesses if rank != self._channel.rank]
        is_witness = self._channel.rank in difference.witnesses
        self._channel.put(f"{self._key}/decision", DecisionMessage(witnesses=witnesses).to_bytes())
        tables = {rank: self._channel.read(f"{self._key}/table/{rank}", sender=f"rank {rank}") for rank in witnesses}
        if is_witness:
            tables[self._channel.rank] = self._table()
        raise disagreement.explain(
            difference,
            [tables[rank] for rank in difference.witnesses],
            fix="Nothing was saved; committed checkpoints are untouched. ",
        )

    def _table(self) -> bytes:
        """Return the table of a rank whose part is written: no other rank is asked for it."""
        assert self._inventory is not None
        return self._inventory.to_bytes()

    def _prepare(self) -> Event:
        self._steps.prepare(self._steps.json_files(self._tensors(self._tiling())))
        return commit_state.ReadyToRename()

    def _tensors(self, tiling: Tiling) -> Mapping[str, TensorEntry]:
        """Return the tensors of the checkpoint. Rank 0 only."""
        return tiling.tensors([report.digests for report in self._reports.values()])

    def _tiling(self) -> Tiling:
        """Return how the pieces of the ranks, in the order of `_reports`, tile the tensors. Rank 0 only.

        Raises:
            CheckpointError: if they do not, or some rank has counted on another to write its bytes, which has not.
        """
        layout = self._attempt.layout
        written_bytes = sum(report.written_bytes for report in self._reports.values())
        expected = sum(place.spec.total_bytes for place in layout.places.values())
        if written_bytes != expected:
            raise CheckpointError(
                "The ranks have not written every byte once",
                expected=f"{expected} B of tensors",
                found=f"{written_bytes} B",
                fix="Nothing was committed; this is a defect of the program that wrote them.",
            )
        return self._tables.tiling(layout, self._reports)

    def _rename(self) -> Event:
        self._steps.rename()
        return commit_state.Renamed()

    def _broadcast(self) -> Event:
        broadcast(self._channel, self._key, self._decision())
        return commit_state.Broadcast()

    def _decision(self) -> DecisionMessage:
        """Return the decision of rank 0, to be sent."""
        state = self._shared.current
        if state.outcome is Outcome.COMMITTED:
            return DecisionMessage(iteration=self._attempt.iteration)
        return DecisionMessage(problem=str(state.problem))

    @property
    def _coordinator(self) -> str:
        return f"rank {self._channel.coordinator}"

    def _read_decision(self, name: str) -> DecisionMessage:
        return DecisionMessage.from_bytes(self._channel.read(f"{self._key}/{name}", sender=self._coordinator))
