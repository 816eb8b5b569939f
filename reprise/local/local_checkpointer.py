"""Saves local checkpoints of a run, copies them between hosts, and finds them again at its next start."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reprise.commit.attempt import find_hosts
from reprise.commit.hosts_commit import LocalSaves
from reprise.format.lineage import Lineage
from reprise.loading.restorer import Restored
from reprise.local.copies import Copies
from reprise.local.host_folders import HostFolders
from reprise.ranks.channel import StoreChannel
from reprise.ranks.file_exchange import FileExchange
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files

# How long the last save of a run waits for the copies of the one before.
_COPIES_S = 10.0


class LocalCheckpointer(Checkpointer):
    """The local checkpoints of a run, on a single rank. All ranks make the same calls in the same order.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        copies: number of hosts after its own with copies of a host's saves.
        local_ranks: the ranks on this host, this one among them.

    Attributes:
        folders: of the hosts.
    """

    def __init__(
        self,
        policy: SavePolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        copies: int,
        local_ranks: Sequence[int] = (),
        files: Files | None = None,
    ) -> None:
        name, timeout_s = f"{nonce}-local", policy.commit_timeout_s
        hosts = find_hosts(channel, local_ranks, f"local/{nonce}")
        self._copies = Copies(channel, hosts, nonce=name, count=copies, timeout_s=timeout_s)
        local = LocalSaves(FileExchange(), self._copies)
        super().__init__(policy, channel, nonce=name, files=files, local_ranks=local_ranks, hosts=hosts, local=local)
        self.folders = HostFolders(self._owned.folder, channel, hosts, nonce=name, timeout_s=timeout_s)
        self._waits = 0

    def start(self, lineage: Lineage | None = None) -> None:
        """Take the locks, settle the remains of dead attempts, and survey the checkpoints on every host.

        Args:
            lineage: of the run; None to take every checkpoint as its own.

        Raises:
            LockError: on every rank, if another job writes to the folder of a host.
            CheckpointError: on every rank, if a folder cannot be written, or the ranks of a host see different folders.
        """
        super().start()
        self.folders.lineage = lineage or Lineage()
        self.folders.survey()
        self._copies.found(self.folders.copied(self._copies.count))

    def loaded(self, restored: Restored) -> None:
        """Take note of the checkpoint at the start of the run."""
        super().loaded(restored)
        if self.folders.owns(restored.checkpoint.path):
            self._copies.loaded(restored.checkpoint.iteration)

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Rename checkpoints overtaken by this run, newer than `iteration` or given up before, out of the way."""
        self._copies.rewound(iteration)
        super().rewind(iteration, {*given_up, *self.folders.given_up})

    def await_copies(self) -> None:
        """Wait a while for the running copies on any host, for the next checkpoint to be copied too.

        The ranks go on together: in a save that follows, none waits for another that still waits for a copy.

        Raises:
            LaunchError: if a rank is lost.
        """
        self.wait()
        self._copies.wait(min(_COPIES_S, self._channel.timeout_s / 2))
        self._waits += 1
        self._channel.agree(f"local/{self._attempts.nonce}/copies/{self._waits}", None)

    def close(self) -> None:
        """Wait for the running save and copies, and release the locks."""
        self.wait()
        self._copies.close()
        super().close()
