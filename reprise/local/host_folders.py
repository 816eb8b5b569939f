"""A run's local checkpoints at its start: which are whole together, and what each host fetches from others."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from reprise.commit.attempt import Hosts
from reprise.commit.messages import pack_files, unpack_files
from reprise.errors import CheckpointError, TrainerError, UnreadableError
from reprise.format.host_file import HostFile, Parts, PieceNumbers, union, without
from reprise.format.lineage import Lineage, saved_lineage
from reprise.format.names import HOST
from reprise.loading.blocks import bytes_of, check_first_blocks
from reprise.loading.reader import Checkpoint, open_checkpoint, open_same, read_places
from reprise.local.link import exchange
from reprise.local.parts import Candidate, Transfer, assign, candidates
from reprise.local.pieces import damaged_pieces
from reprise.local.skeleton import skeleton_of, write_skeleton
from reprise.ranks.channel import StoreChannel
from reprise.storage.atomic import replace_file
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import exists
from reprise.storage.shared_folder import on_this_host

_log = logging.getLogger(__name__)


class HostFolders:
    """The hosts' folders, seen from a rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: This launch's random name, equal on all ranks.
        timeout_s: Seconds that a host waits for another's bytes.

    Attributes:
        leads: Whether this rank leads its host.
        lineage: The run's lineage, set before the first survey.
        given_up: On leaders, this host's iterations on branches the run has given up.
        candidates: On rank 0, the candidates, newest first.
    """

    def __init__(
        self, folder: CheckpointFolder, channel: StoreChannel, hosts: Hosts, *, nonce: str, timeout_s: float
    ) -> None:
        self.folder, self.hosts = folder, hosts
        self._channel, self._nonce, self._timeout_s = channel, nonce, timeout_s
        self._host = hosts.number_of(channel.rank)
        self.leads = channel.rank in hosts.leaders
        self._messages = 0
        self.lineage = Lineage()
        self.given_up: set[int] = set()
        self._surveyed: dict[int, Parts] = {}  # on leaders, for this host
        self.candidates: list[Candidate] = []

    def survey(self) -> None:
        """Report every host's checkpoints to rank 0, which then has the `candidates` in the run's `lineage`."""
        with self._agreed():
            iterations = self.folder.committed() if self.leads else []
            intact = [(iteration, self._intact(iteration)) for iteration in iterations]
            self._surveyed = {iteration: host.parts for iteration, host in intact if host is not None}
        data = zlib.compress(json.dumps(self._surveyed).encode())
        received = self._channel.gather(self._key("survey"), data)
        tables = [json.loads(zlib.decompress(received[rank])) for rank in self.hosts.leaders if received]
        self.candidates = candidates([{int(number): Parts(*row) for number, row in table.items()} for table in tables])

    def _intact(self, iteration: int) -> HostFile | None:
        """Return the `host.json` for a run's iteration on this host. Log and return None for any other folder.

        A folder with a damaged JSON file or header counts as empty: a load replaces it.
        """
        path = self.folder.iteration(iteration)
        try:
            checkpoint = open_checkpoint(path, self.folder.files)
            read_places(checkpoint)
            is_admitted = self.lineage.admits(saved_lineage(checkpoint.state, where=path), iteration)
        except UnreadableError:
            raise
        except TrainerError as error:
            _log.error("skipping %s: %s", path, error)
            return None
        if checkpoint.host is None:
            _log.warning("%s is not a local checkpoint: it has no %s", path, HOST)
        elif not is_admitted:
            self.given_up.add(iteration)
            _log.error("skipping %s: this run has abandoned its branch, or it belongs to another run", path)
            return None
        return checkpoint.host

    @property
    def iterations(self) -> list[int]:
        """Return the iterations with a part on some host. Rank 0 only."""
        return [candidate.iteration for candidate in self.candidates]

    def copied(self, count: int) -> list[int]:
        """Return the surveyed iterations for which this host holds the parts of the `count` hosts before it."""
        names = self.hosts.names
        sources = {(self._host - step) % len(names) for step in range(1, count + 1)}
        surveyed = self._surveyed.items()
        return [number for number, parts in surveyed if parts.hosts == names and sources <= set(parts.whole)]

    def paths(self, iteration: int | None = None) -> list[Path]:
        """Return the checkpoints whole on all hosts together, newest first, or only the given one. Rank 0 only."""
        paths: dict[int, Path] = {}
        for candidate in self.candidates:
            if iteration not in (None, candidate.iteration) or candidate.iteration in paths:
                continue
            if candidate.problem:
                _log.warning("local %s", candidate.problem)
            else:
                paths[candidate.iteration] = self.folder.iteration(candidate.iteration)
        return list(paths.values())

    def describe_missing(self) -> str:
        """Describe what the newest local checkpoint lacks. Empty if there is no checkpoint. Rank 0 only."""
        return self.candidates[0].problem if self.candidates else ""

    def complete(
        self, path: Path, check: Callable[[Checkpoint], None], pieces_to_read: Callable[[Checkpoint], PieceNumbers]
    ) -> tuple[str, str]:
        """Fetch to every host the missing pieces that its ranks will read, from hosts holding the part.

        Args:
            check: Refuses another run's checkpoint before anything is fetched. Called on rank 0 only.
            pieces_to_read: Returns the pieces that this rank reads.

        Returns:
            The manifest's digest, and in words where the bytes came from.

        Raises:
            TrainerError: No host has a part, a part arrives damaged, or it does not fit on a disk. Every rank raises.
        """
        digest = self._seed(path)
        with self._agreed(path):
            checkpoint = open_same(path, digest, self.folder.files)
            host = checkpoint.host
            assert host is not None
            if self._channel.rank == 0:
                check(checkpoint)
            if self.leads:
                check_first_blocks(checkpoint)
            lacking = without(pieces_to_read(checkpoint), host.held)
        parts = host.by_host(self._of_host(lacking))
        sizes = {part: bytes_of(checkpoint, pieces) for part, pieces in parts.items()}

        def plan(tables: list[dict[str, int]]) -> list[Transfer]:
            needs = [{int(part): size for part, size in tables[rank].items()} for rank in self.hosts.leaders]
            return assign(needs, self._candidate(path).folders)

        transfers = [Transfer(*row) for row in self._channel.join(self._key("plan"), sizes, plan)]
        if not transfers:
            return digest, "all local"
        with self._agreed(path):
            needed, free = sum(sizes.values()), self.folder.files.free_bytes(path)
            if free is not None and free < needed:
                raise OSError(errno.ENOSPC, f"{free} B free, {needed} B needed")
        name = self._key("links")
        with self._agreed(path):
            if self.leads:
                exchange(self._channel, name, checkpoint, transfers, parts, host=self._host, timeout_s=self._timeout_s)
        sent_bytes = Counter[str]()
        for transfer in transfers:
            sent_bytes[self.hosts.names[transfer.source]] += transfer.total_bytes
        return digest, ", ".join(f"{size / 1e6:.1f} MB from {name}" for name, size in sent_bytes.items())

    def _of_host(self, pieces: PieceNumbers) -> PieceNumbers:
        """On a leader, return the pieces for all its host's ranks; on other ranks, none."""
        key = self._key("pieces")
        if not self.leads:
            self._channel.send(key, json.dumps(pieces).encode())
            return {}
        data = self._channel.read_all(key, self.hosts.ranks[self._host][1:])
        return union([pieces, *map(json.loads, data)])

    def heal(self, path: Path) -> bool:
        """Check a local checkpoint on every host and give up damaged pieces. Return whether there were any."""
        is_damaged = False
        if self.leads:
            try:
                is_damaged = exists(path / HOST) and self._give_up_damaged(path)
            except (TrainerError, OSError) as error:
                _log.error("%s cannot be checked: %s", path, error)
        is_damaged = bool(self._channel.join(self._key("damaged"), is_damaged, any))
        self.survey()
        return is_damaged

    def _give_up_damaged(self, path: Path) -> bool:
        """Give up a local checkpoint's damaged pieces on this host. Return whether there were any."""
        checkpoint = open_checkpoint(path, self.folder.files)
        host = checkpoint.host
        assert host is not None
        damaged = damaged_pieces(checkpoint, host.held)
        if damaged:
            count, first = sum(map(len, damaged.values())), next(iter(damaged))
            _log.error("%s on this host is damaged: %d of its pieces, the first of %s", path, count, first)
            noted = replace(host, held=without(host.held, damaged))
            replace_file(self.folder.files, path / HOST, noted.to_bytes())
        return bool(damaged)

    def _candidate(self, path: Path) -> Candidate:
        """Return the checkpoint at a path, which the hosts must hold whole together. Rank 0 only.

        Raises:
            CheckpointError: They do not.
        """
        candidate = next((each for each in self.candidates if self.folder.iteration(each.iteration) == path), None)
        if candidate is None or candidate.problem:
            raise CheckpointError(
                "A local checkpoint is incomplete",
                where=path,
                found=candidate.problem if candidate else "no part of it",
                fix="Bring back the host that has the missing parts, or load an older iteration.",
            )
        return candidate

    def _seed(self, path: Path) -> str:
        """Create the checkpoint folder on every host without it: JSON files, and tensor files full of holes.

        Returns:
            The manifest's digest.

        Raises:
            CheckpointError: A part is on no host. Every rank raises.
        """

        def choose() -> list[object]:
            candidate = self._candidate(path)
            lacking = [number for number in range(len(self.hosts.names)) if number not in candidate.folders]
            return [candidate.iteration, candidate.together.manifest, min(candidate.folders), lacking]

        iteration, digest, source, lacking = self._channel.from_first(self._key("candidate"), choose)
        if not lacking:
            return str(digest)
        key, sent = self._key("seed"), list[str]()
        with self._agreed(path):
            if self.leads and self._host == source:
                checkpoint = open_checkpoint(path, self.folder.files)
                assert checkpoint.host is not None
                host = replace(checkpoint.host, host=None, held={})
                sent = self._channel.put(key, pack_files({**skeleton_of(checkpoint), HOST: host.to_bytes()}))
        with self._agreed(path):
            if self.leads and self._host in lacking:
                attempt, files = f"{self._nonce}-fetch", self.folder.files
                skeleton = unpack_files(*self._channel.read_all(key, [self.hosts.leaders[source]]))
                partial = self.folder.partial(iteration, attempt)
                write_skeleton(partial, skeleton, files, is_whole=False)
                files.sync_folder(partial)
                self.given_up.discard(iteration)  # its folder is renamed to make room
                self.folder.commit(iteration, attempt)
        self._channel.delete(sent)
        return str(digest)

    @contextlib.contextmanager
    def _agreed(self, path: Path | None = None) -> Iterator[None]:
        """Agree after this block: if any rank had a problem, every rank raises; see `StoreChannel.agree`.

        Args:
            path: A checkpoint that the block brings to this host. A full disk does not make it damaged.
        """
        with self._channel.agreed(self._key("agree")):
            try:
                yield
            except OSError as error:
                raise UnreadableError(
                    "A local checkpoint cannot be completed on this host",
                    where=on_this_host(path or self.folder.root),
                    found=error.strerror,
                    fix="Nothing is lost. Free up space on this host, or choose another folder.",
                ) from error

    def _key(self, kind: str) -> str:
        """Return a new key."""
        self._messages += 1
        return f"local/{self._nonce}/{self._messages}/{kind}"
