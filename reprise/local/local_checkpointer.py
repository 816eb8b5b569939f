"""Saves a run's local checkpoints, copies them between hosts, and finds them again at its next start."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reprise.commit.attempt import find_hosts
from reprise.format.lineage import Lineage
from reprise.loading.restorer import Restored
from reprise.local.copies import Copies
from reprise.local.host_folders import HostFolders
from reprise.ranks.channel import StoreChannel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy
from reprise.storage.files import Files

# How long a run's last save waits for the previous checkpoint's copies.
_COPIES_S = 10.0


class LocalCheckpointer(Checkpointer):
    """One rank's checkpointer for local checkpoints. All ranks make the same calls in the same order.

    Args:
        nonce: This launch's random name, equal on all ranks.
        copies: How many following hosts hold a copy of each host's saves.
        local_ranks: The ranks on this host, including this one.

    Attributes:
        folders: The hosts' folders.
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
        super().__init__(
            policy, channel, nonce=name, files=files, local_ranks=local_ranks, hosts=hosts, copying=self._copies
        )
        self.folders = HostFolders(self.folder, channel, hosts, nonce=name, timeout_s=timeout_s)

    def start(self, lineage: Lineage | None = None) -> None:
        """Take the locks, clean up after dead attempts, and survey every host's checkpoints.

        Args:
            lineage: The run's lineage. None accepts every checkpoint.

        Raises:
            LockError: Another job writes to a host's folder. Every rank raises.
            CheckpointError: A folder cannot be written, or a host's ranks see different folders. Every rank raises.
        """
        super().start()
        self.folders.lineage = lineage or Lineage()
        self.folders.survey()
        self._copies.found(self.folders.copied(self._copies.count))

    def note_loaded(self, restored: Restored) -> None:
        """Note the checkpoint from which the run starts."""
        super().note_loaded(restored)
        if restored.checkpoint.path.parent == self.folders.folder.root:
            self._copies.loaded(restored.checkpoint.iteration)

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Rename overtaken checkpoints, newer than `iteration` or given up before, out of the way."""
        self._copies.rewound(iteration)
        super().rewind(iteration, {*given_up, *self.folders.given_up})

    def await_copies(self) -> None:
        """Wait a limited time for running copies on any host, so that the next checkpoint is copied too.

        The ranks go on together: in a following save, no rank waits for one that still waits for a copy.

        Raises:
            LaunchError: A rank is lost.
        """
        self.wait()
        with self._leading():
            self._copies.wait(min(_COPIES_S, self._channel.timeout_s / 2))

    def close(self) -> None:
        """Wait for the running save and copies, and release the locks."""
        self.wait()
        self._copies.close()
        super().close()
