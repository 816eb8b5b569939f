"""The local checkpoints of a run at its start: which are whole together, and what each host fetches from elsewhere."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reprise.atomic import replace_file
from reprise.commit.attempt import Hosts
from reprise.commit.channel import StoreChannel
from reprise.commit.file_exchange import FileExchange
from reprise.errors import CheckpointError, TrainerError, UnreadableError
from reprise.format import host_file
from reprise.format.host_file import HostFile, PieceNumbers, union, without
from reprise.format.layout import Place
from reprise.format.lineage import Lineage, saved_lineage
from reprise.format.names import HOST
from reprise.loading.blocks import bytes_of
from reprise.loading.reader import Checkpoint, check_first_blocks, open_checkpoint, read_places
from reprise.loading.same_checkpoint import open_same
from reprise.local.fetch import Fetcher
from reprise.local.pieces import damaged_pieces
from reprise.local.skeleton import make_skeleton, mend_skeleton, skeleton_of
from reprise.local.survey import Candidate, PartSummary, Transfer, assign, candidates, describe
from reprise.paths import exists
from reprise.storage.folder import CheckpointFolder
from reprise.storage.shared_folder import on_this_host

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedFrom:
    """The origin of a load's bytes: by name of a host the bytes taken from it by others."""

    local_bytes: int
    from_hosts: Mapping[str, int]
    shared_bytes: int

    @staticmethod
    def here() -> LoadedFrom:
        """Return the origin of bytes read where they lie."""
        return LoadedFrom(1, {}, 0)

    def __str__(self) -> str:
        total = max(1, self.local_bytes + sum(self.from_hosts.values()) + self.shared_bytes)
        from_hosts = [f"{_percent(size, total)} from {name}" for name, size in self.from_hosts.items() if size]
        shares = [
            f"{_percent(self.local_bytes, total)} local",
            *from_hosts,
            f"{_percent(self.shared_bytes, total)} shared",
        ]
        return ", ".join(shares)


def _percent(size: int, total: int) -> str:
    return "<1 %" if 0 < size < total / 100 else f"{100 * size / total:.0f} %"


class HostFolders:
    """The folders of the hosts, on a rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        shared: the folder of the hosts' common checkpoints, or None.
        nonce: a name of this run of the program, equal on all ranks.
        timeout_s: how long a host waits for the bytes of another.

    Attributes:
        leads: whether this rank is the leader of its host.
        lineage: of the run, known before the first survey.
        given_up: on leaders, the iterations of this host on branches given up by the run.
        candidates: on rank 0, the newest first.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        channel: StoreChannel,
        hosts: Hosts,
        *,
        shared: CheckpointFolder | None,
        nonce: str,
        timeout_s: float,
    ) -> None:
        self.folder, self.hosts = folder, hosts
        self._channel, self._shared, self._nonce = channel, shared, nonce
        self._host = hosts.number_of(channel.rank)
        self.leads = channel.rank in hosts.leaders
        self._fetcher = Fetcher(channel, hosts, nonce=nonce, timeout_s=timeout_s)
        self._messages = 0
        self.lineage = Lineage()
        self.given_up: set[int] = set()
        self._surveyed: dict[int, HostFile] = {}  # on leaders, of this host
        self.candidates: list[Candidate] = []

    @property
    def share(self) -> tuple[int, int]:
        """Return this rank's number among the ranks of its host, and how many they are."""
        ranks = self.hosts.ranks_with(self._channel.rank)
        return ranks.index(self._channel.rank), len(ranks)

    def survey(self) -> None:
        """Let rank 0 know what lies on every host. Afterwards it has the `candidates`: those of the run's `lineage`."""
        damaged: list[int] = []
        with self._agreed(lambda error: self.folder.cannot_write(error, what="The folder of local checkpoints")):
            if self.leads:
                self._surveyed = self._own()
                damaged = [iteration for iteration in list(self._surveyed) if not self._is_intact(iteration)]
        summaries = {iteration: PartSummary.of(part) for iteration, part in self._surveyed.items()}
        rows = {iteration: summary.row() for iteration, summary in summaries.items()}
        data = json.dumps([rows, damaged, sorted(self.given_up)]).encode()
        received = self._channel.gather(self._key("survey"), data)
        tables = [json.loads(received[rank]) for rank in self.hosts.leaders] if received else []
        host_summaries = [
            {int(iteration): PartSummary.from_row(row) for iteration, row in table[0].items()} for table in tables
        ]
        divisions = {summaries[iteration].division: part for iteration, part in self._surveyed.items()}
        parts = self._parts(host_summaries, divisions)
        if tables:
            bad = [(number, iteration) for number, table in enumerate(tables) for iteration in table[1]]
            self.candidates = candidates(parts, bad)
            for name, table in zip(self.hosts.names, tables, strict=True):
                if table[2]:
                    listed = ", ".join(map(str, table[2]))
                    _log.warning("local iterations of branches that the run has given up, on host %s: %s", name, listed)

    def _parts(
        self, host_summaries: Sequence[Mapping[int, PartSummary]], divisions: dict[str, HostFile]
    ) -> list[dict[int, HostFile]]:
        """Return on rank 0 the `host.json` of each host, by iteration; one leader sends each division that it lacks.

        Args:
            host_summaries: on rank 0, the summaries of each host by iteration.
            divisions: a `host.json` of this host for each of its divisions; rank 0 adds those of others.
        """

        def absent() -> dict[str, list[int]]:
            places = {
                summary.division: [self.hosts.leaders[number], iteration]
                for number, summaries in enumerate(host_summaries)
                for iteration, summary in summaries.items()
            }
            return {division: place for division, place in places.items() if division not in divisions}

        key = self._key("divisions")
        for division, (leader, iteration) in self._channel.from_first(key, absent).items():
            if leader == self._channel.rank:
                self._channel.put(f"{key}/{division}", self._surveyed[iteration].to_bytes())
            elif self._channel.coordinates:
                data = self._channel.take(f"{key}/{division}", sender=f"rank {leader}")
                divisions[division] = host_file.from_bytes(data, where=f"rank {leader}")
        by_writer = {division: part.by_writer() for division, part in divisions.items()} if host_summaries else {}
        return [
            {
                iteration: summary.part(divisions[summary.division], by_writer[summary.division])
                for iteration, summary in summaries.items()
            }
            for summaries in host_summaries
        ]

    @property
    def iterations(self) -> list[int]:
        """Return the iterations of which some host has a part. Rank 0 only."""
        return [candidate.iteration for candidate in self.candidates]

    def copied(self, count: int) -> list[int]:
        """Return the iterations with complete copies here of the `count` hosts before this host, as surveyed."""
        names = self.hosts.names
        sources = [(self._host - step) % len(names) for step in range(1, count + 1)]
        return [
            iteration
            for iteration, host in self._surveyed.items()
            if host.hosts == names and not any(without(host.written_by(source), host.held) for source in sources)
        ]

    def paths(self, iteration: int | None = None) -> list[tuple[int, Path]]:
        """Return the iterations to be had complete, newest first, or only the given iteration. Rank 0 only."""
        complete: dict[int, Path] = {}
        for candidate in self.candidates:
            if iteration not in (None, candidate.iteration) or candidate.iteration in complete:
                continue
            lacks = candidate.describe_missing()
            if lacks and not self._is_in_shared(candidate.iteration):
                _log.warning("local iteration %d is not whole: missing are %s", candidate.iteration, lacks)
                continue
            complete[candidate.iteration] = self.folder.iteration(candidate.iteration)
        return list(complete.items())

    def describe_missing(self) -> str:
        """Return in words what the newest local checkpoint lacks; empty if there is none. Rank 0 only."""
        if not self.candidates:
            return ""
        newest = self.candidates[0]
        return f"iteration {newest.iteration} lacks {newest.describe_missing()}"

    def owns(self, path: Path) -> bool:
        """Return whether a path is of a local checkpoint of this run."""
        return path.parent == self.folder.root

    def complete(
        self, path: Path, check: Callable[[Checkpoint], None], pieces_to_read: Callable[[Checkpoint], PieceNumbers]
    ) -> LoadedFrom:
        """Have on every host what its ranks read of a local checkpoint: fetch missing pieces from other hosts.

        Args:
            check: refuses a checkpoint of another run before anything is fetched; rank 0 only.
            pieces_to_read: the pieces read by this rank.

        Raises:
            TrainerError: on every rank, if a piece is to be had nowhere, arrives damaged, or does not fit on a disk.
        """
        digest = self._seed(path)
        needs, lacking = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
        failed = partial(_not_completed, path)
        with self._agreed(failed):
            checkpoint = open_same(path, digest, self.folder.files)
            if self._channel.rank == 0:
                check(checkpoint)
            if self.leads:
                check_first_blocks(checkpoint, read_places(checkpoint))
            places, needs = read_places(checkpoint), dict(pieces_to_read(checkpoint))
            lacking = without(needs, {} if checkpoint.host is None else checkpoint.host.held)
        verdicts = self._channel.gather(self._key("lacking"), json.dumps(bool(lacking)).encode())
        if not self._channel.from_first(self._key("fetching"), lambda: any(map(json.loads, verdicts))):
            return LoadedFrom.here()  # a large checkpoint has millions of pieces to list
        tables = [json.loads(data) for data in self._channel.gather(self._key("needs"), json.dumps(needs).encode())]
        report, key = LoadedFrom.here(), self._key("plan")
        with self._agreed(failed):
            if tables:
                transfers, absent, report = self._plan(self._candidate(path), checkpoint, places, tables)
                self._send_plan(key, transfers, absent)
        if self.leads:
            moves, from_shared = json.loads(self._channel.take(f"{key}/{self._host}", sender="rank 0"))
            incoming = [Transfer(source, target, _tuples(pieces)) for source, target, pieces in moves]
            self._fetch(checkpoint, places, incoming, _tuples(from_shared))
        else:
            self._fetch(checkpoint, places, [], {})
        return report

    def _send_plan(self, key: str, transfers: Sequence[Transfer], absent: Sequence[PieceNumbers]) -> None:
        """Send every leader the transfers of its host, and the pieces that it takes from the shared folder."""
        moves: list[list[list[object]]] = [[] for _ in absent]
        for transfer in transfers:
            for host in (transfer.source, transfer.target):
                moves[host].append([transfer.source, transfer.target, transfer.pieces])
        for host, pieces in enumerate(absent):
            self._channel.put(f"{key}/{host}", json.dumps([moves[host], pieces]).encode())

    def _fetch(
        self,
        checkpoint: Checkpoint,
        places: dict[str, Place],
        transfers: Sequence[Transfer],
        from_shared: PieceNumbers,
    ) -> None:
        """Carry out the transfers, and take from the shared folder what this host lacks after them, if there is room.

        Raises:
            TrainerError: on every rank, if a host has no room, or does not get its pieces undamaged.
        """
        failed = partial(_not_completed, checkpoint.path)
        with self._agreed(failed):
            if self.leads:
                arriving = [transfer.pieces for transfer in transfers if transfer.target == self._host]
                self._require_room(checkpoint.path, bytes_of(checkpoint, places, union([*arriving, from_shared])))
        with self._agreed(failed):
            if self.leads:
                self._fetcher.run(checkpoint, places, transfers, from_shared, self._in_shared)

    def _require_room(self, path: Path, needed: int) -> None:
        free = self.folder.files.free_bytes(path)
        if free is not None and free < needed:
            raise _without_room(path, f"{free} B free", expected=f"{needed} B free")

    def heal(self, path: Path) -> bool:
        """Check a local checkpoint on every host and give up damaged pieces; return whether there were any."""
        is_damaged = False
        if self.leads:
            try:
                is_damaged = exists(path / HOST) and self._give_up_damaged(path)
            except (TrainerError, OSError) as error:
                _log.error("%s cannot be checked: %s", path, error)
        verdicts = self._channel.gather(self._key("damaged"), json.dumps(is_damaged).encode())
        is_damaged = bool(self._channel.from_first(self._key("healed"), lambda: any(map(json.loads, verdicts))))
        self.survey()
        return is_damaged

    def _give_up_damaged(self, path: Path) -> bool:
        """Give up the damaged pieces of a local checkpoint on this host; return whether there were any."""
        checkpoint = open_checkpoint(path, self.folder.files)
        assert checkpoint.host is not None
        damaged = damaged_pieces(checkpoint, read_places(checkpoint), checkpoint.host.held)
        if not damaged:
            return False
        _log.error("%s on this host is damaged: %s", path, describe(damaged, checkpoint.host))
        intact = without(checkpoint.host.held, damaged)
        replace_file(self.folder.files, path / HOST, replace(checkpoint.host, held=intact).to_bytes())
        return True

    def _own(self) -> dict[int, HostFile]:
        """Return each `host.json` of this host by iteration; damaged files are logged and left out."""
        host_files: dict[int, HostFile] = {}
        for iteration in self.folder.committed():
            where = self.folder.iteration(iteration) / HOST
            try:
                host_files[iteration] = host_file.from_bytes(self.folder.files.read_whole(where), where=where)
            except FileNotFoundError:
                _log.warning("%s is no local checkpoint: it has no %s", where.parent, HOST)
            except TrainerError as error:
                _log.error("%s is skipped: %s", where.parent, error)
        return host_files

    def _is_intact(self, iteration: int) -> bool:
        """Return whether the JSON files and headers of an iteration are intact on this host; log the damage.

        An iteration given up by the run moves from the survey to `given_up`.
        """
        path = self.folder.iteration(iteration)
        try:
            checkpoint = open_checkpoint(path, self.folder.files)
            read_places(checkpoint)
            if not self.lineage.admits(saved_lineage(checkpoint.state, where=path), iteration):
                del self._surveyed[iteration]
                self.given_up.add(iteration)
        except UnreadableError:
            raise
        except TrainerError as error:
            _log.error("%s", error)
            return False
        return True

    def _candidate(self, path: Path) -> Candidate:
        """Return the most complete candidate of an iteration. Rank 0 only."""
        return next(c for c in self.candidates if self.folder.iteration(c.iteration) == path)

    def _seed(self, path: Path) -> str:
        """Have the folder of a checkpoint on every host: the JSON files, and tensor files of holes.

        A host whose JSON files or headers are damaged gets them anew.

        Returns:
            The digest of the manifest.

        Raises:
            CheckpointError: on every rank, if they are damaged on all hosts.
        """

        def choose() -> list[object]:
            candidate = self._candidate(path)
            lacking = [number for number in range(len(self.hosts.names)) if number not in candidate.intact]
            return [candidate.iteration, candidate.manifest, min(candidate.intact, default=None), lacking]

        iteration, digest, source, lacking = self._channel.from_first(self._key("candidate"), choose)
        if source is None:
            raise CheckpointError(
                "The JSON files or headers of a local checkpoint are damaged on all hosts", where=path
            )
        if not lacking:
            return str(digest)
        key, failed = self._key("seed"), partial(_not_completed, path)
        with self._agreed(failed):
            if self.leads and self._host == source:
                contents = skeleton_of(open_checkpoint(path, self.folder.files))
                self._channel.put(key, FileExchange().pack({**contents, HOST: self._surveyed[iteration].to_bytes()}))
        with self._agreed(failed):
            if self.leads and self._host in lacking:
                skeleton = FileExchange().unpack(self._channel.read(key))
                template = host_file.from_bytes(skeleton.pop(HOST), where=f"host {self.hosts.names[source]}")
                part = self._surveyed.get(iteration)
                if part is not None and part.manifest == digest:
                    mend_skeleton(path, skeleton, self.folder.files)
                else:
                    self.given_up.discard(iteration)  # which is renamed to make room
                    make_skeleton(self.folder, iteration, template, skeleton, attempt=f"{self._nonce}-fetch")
        if self.leads and self._host == source:
            self._channel.delete([key])
        return str(digest)

    def _plan(
        self, candidate: Candidate, checkpoint: Checkpoint, places: Mapping[str, Place], tables: Sequence[PieceNumbers]
    ) -> tuple[list[Transfer], list[PieceNumbers], LoadedFrom]:
        """Return the transfers between hosts, by host the pieces of the shared folder, and the sum. Rank 0 only.

        Raises:
            CheckpointError: naming the pieces to be had nowhere.
        """
        required = [union(tables[rank] for rank in ranks) for ranks in self.hosts.ranks]
        present = {number: host.held for number, host in candidate.parts.items()}
        needs = [without(pieces, present.get(number, {})) for number, pieces in enumerate(required)]
        transfers, absent = assign(needs, candidate.parts)
        if any(absent) and not self._is_in_shared(candidate.iteration):
            host = next(iter(candidate.parts.values()))
            raise CheckpointError(
                "A local checkpoint is not whole",
                where=self.folder.iteration(candidate.iteration),
                found=f"on no host: {describe(union(absent), host)}",
                fix="Bring back the host that has them, or load an older iteration.",
            )
        if not transfers and not any(absent):  # a large checkpoint has millions of pieces to count
            return [], list(absent), LoadedFrom.here()
        sizes: dict[str, int] = {}
        for transfer in transfers:
            name = self.hosts.names[transfer.source]
            sizes[name] = sizes.get(name, 0) + bytes_of(checkpoint, places, transfer.pieces)
        shared_bytes = sum(bytes_of(checkpoint, places, pieces) for pieces in absent)
        total = sum(bytes_of(checkpoint, places, pieces) for pieces in required)
        return transfers, list(absent), LoadedFrom(total - sum(sizes.values()) - shared_bytes, sizes, shared_bytes)

    def _is_in_shared(self, iteration: int) -> bool:
        return self._shared is not None and iteration in self._shared.committed()

    def _in_shared(self, iteration: int) -> Checkpoint:
        assert self._shared is not None
        return open_checkpoint(self._shared.iteration(iteration), self._shared.files)

    @contextlib.contextmanager
    def _agreed(self, failed: Callable[[OSError], TrainerError]) -> Iterator[None]:
        """Let every rank go on after this block only if it had no problem on any rank; see `StoreChannel.agree`.

        Args:
            failed: makes the error of a failing disk.
        """
        with self._channel.agreed(self._key("agree")):
            try:
                yield
            except OSError as error:
                raise failed(error) from error

    def _key(self, kind: str) -> str:
        """Return a new key."""
        self._messages += 1
        return f"local/{self._nonce}/{self._messages}/{kind}"


def _not_completed(path: Path, error: OSError) -> UnreadableError:
    return _without_room(path, error.strerror)


def _without_room(path: Path, actual: str | None, *, expected: str | None = None) -> UnreadableError:
    """Return the error of a host without room for missing pieces: it says nothing of the checkpoint."""
    return UnreadableError(
        "A local checkpoint cannot be completed on this host",
        where=on_this_host(path),
        expected=expected,
        found=actual,
        fix="Nothing is lost. Make room on this host, or name another folder.",
    )


def _tuples(pieces: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(numbers) for name, numbers in pieces.items()}
