"""Commits a save into per-host folders: all folders are prepared first, then renamed, rank 0's before the others.

Rank 0 sends all JSON files to the other leaders, and waits until every folder is prepared. They rename on its decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from reprise.commit import commit_state
from reprise.commit.attempt import Attempt, Copying, SharedCommitState
from reprise.commit.commit_state import Action, Event
from reprise.commit.joint_plan import KnownPlans
from reprise.commit.messages import Answer, DecisionMessage
from reprise.commit.protocol import Steps, TwoPhaseCommit
from reprise.errors import CheckpointError
from reprise.format import host_file, manifest
from reprise.format.host_file import HostFile
from reprise.format.names import HOST, MANIFEST
from reprise.ranks.channel import StoreChannel
from reprise.ranks.file_exchange import FileExchange


@dataclass(frozen=True, slots=True)
class LocalSaves:
    """What leaders keep between saves into per-host folders.

    Args:
        exchange: The JSON files already sent.
        copying: The copies.
    """

    exchange: FileExchange
    copying: Copying


class HostsCommit(TwoPhaseCommit):
    """One rank's side in committing an attempt into per-host folders; see `TwoPhaseCommit`."""

    def __init__(
        self,
        channel: StoreChannel,
        attempt: Attempt,
        shared: SharedCommitState,
        steps: Steps,
        plans: KnownPlans,
        *,
        local: LocalSaves,
    ) -> None:
        super().__init__(channel, attempt, shared, steps, plans)
        self._exchange, self._copying = local.exchange, local.copying
        self._statuses: dict[int, bytes] = {}  # on rank 0, by leader
        self._order = b""

    def run(self) -> None:
        """Make the checkpoint, and start its copies; see `TwoPhaseCommit.run`."""
        super().run()
        if self._channel.rank in self._attempt.hosts.leaders:
            self._copying.committed(self._attempt, self._order)

    def _begin(self) -> None:
        """Require all ranks on a host to see the same folder."""
        for name, ranks in zip(self._attempt.hosts.names, self._attempt.hosts.ranks, strict=True):
            for rank in ranks:
                if self._offers[rank].view != self._offers[ranks[0]].view:
                    raise CheckpointError(
                        "A rank does not see the folder of local checkpoints of its host",
                        where=f"host {name}, {self._attempt.folder.root}",
                        expected=f"the folder of rank {ranks[0]}",
                        found=f"another one on rank {rank}",
                        fix="Nothing was saved. Mount the same folder at this path for all ranks on a host.",
                    )
        super()._begin()

    def _calls(self) -> dict[Action, Callable[[], Event | None]]:
        return super()._calls() | {Action.ANSWER: self._answer, Action.AWAIT_LEADERS: self._await_leaders}

    def _await_decision(self) -> Event:
        """Wait for rank 0's decision or, on another host's leader, its request to prepare."""
        if self._shared.current.stage is commit_state.CommitStage.AWAITING and self._shared.current.leads:
            keys = [f"{self._key}/files", f"{self._key}/decision"]
            if self._channel.await_any(keys, sender=self._coordinator) == keys[0]:
                return commit_state.AskedToPrepare()
        return super()._await_decision()

    def _prepare(self) -> None:
        if self._channel.coordinates:
            files = self._with_host_file(self._steps.json_files(self._tensors()))
            if len(self._attempt.hosts.leaders) > 1:
                self._channel.put(f"{self._key}/files", self._exchange.pack(files))
        else:
            files = self._exchange.unpack(self._channel.read(f"{self._key}/files", sender=self._coordinator))
        self._steps.prepare(of_host(files, self._attempt.hosts.number_of(self._channel.rank)), {})

    def _answer(self) -> None:
        problem = self._shared.current.problem
        status = b"" if problem is not None else self._copying.status(self._attempt.iteration)
        answer = Answer(problem, status.decode())
        self._channel.put(f"{self._key}/prepared/{self._channel.rank}", answer.to_bytes())

    def _await_leaders(self) -> Event:
        answers = self._read_all("prepared", Answer.from_bytes, sorted(self._shared.current.unprepared))
        self._statuses |= {leader: answer.status.encode() for leader, answer in answers.items()}
        problems = (
            f"Rank {leader}: {answer.problem}" for leader, answer in answers.items() if answer.problem is not None
        )
        return commit_state.Arrived(frozenset(answers), next(problems, None))

    def _rename(self) -> None:
        if self._channel.coordinates:
            self._exchange.delivered(was_taken=True)
        super()._rename()

    def _decided(self, decision: DecisionMessage) -> Event:
        self._order = decision.copies.encode()
        return super()._decided(decision)

    def _decision(self) -> DecisionMessage:
        decision = super()._decision()
        if decision.problem is None:
            self._statuses[self._channel.rank] = self._copying.status(self._attempt.iteration)
            self._order = self._copying.decide([self._statuses[rank] for rank in self._attempt.hosts.leaders])
        return replace(decision, copies=self._order.decode())

    def _with_host_file(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the JSON files followed by `host.json` for rank 0's host."""
        attempt = self._attempt
        assert self._plan is not None
        host_of = {rank: number for number, ranks in enumerate(attempt.hosts.ranks) for rank in ranks}
        hosts = [host_of[rank] for rank in self._reports]
        itemsizes = {name: place.spec.dtype.itemsize for name, place in attempt.layout.places.items()}
        writers = {
            name: tuple(hosts[table] for table in tables) for name, tables in self._plan.writers(itemsizes).items()
        }
        digest = manifest.digest_of(files[MANIFEST])
        return {**files, HOST: HostFile(attempt.name, digest, 0, attempt.hosts.names, writers, {}).to_bytes()}


def of_host(files: Mapping[str, bytes], host: int) -> dict[str, bytes]:
    """Return rank 0's JSON files for the host with this number: `host.json` lists its ranks' pieces."""
    record = host_file.from_bytes(files[HOST], where=HOST)
    record = replace(record, host=host, held=record.written_by(host))
    names = {name: host_file.stored_name(name, is_whole=record.is_whole) for name in files}
    return {names[name]: data for name, data in {**files, HOST: record.to_bytes()}.items()}
