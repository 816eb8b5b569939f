"""Saves local checkpoints of a run, copies them between hosts, and finds them again at its next start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.commit.attempt import find_hosts
from reprise.commit.hosts_commit import LocalSaves
from reprise.format.lineage import Lineage
from reprise.loading.restorer import Restored
from reprise.local.copies import Copies
from reprise.local.host_folders import HostFolders
from reprise.ranks.channel import StoreChannel
from reprise.ranks.file_exchange import FileExchange
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder

# How long the last save of a run waits for the copies of the one before.
_COPIES_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """The folder, the interval and the retention of local checkpoints.

    Args:
        folder: a folder of each host's own, at the same path on all.
        save_interval: save at every multiple of this iteration count; 0 saves only on a call of `save`.
        keep: number of newest checkpoints kept, beside the newest copied everywhere and the named iterations.
        copies: number of hosts after its own with copies of a host's saves.
        saving: file size, timeouts, staging and the named iterations, as for the shared folder.
    """

    folder: Path
    save_interval: int
    keep: int
    copies: int
    saving: SavePolicy


class LocalCheckpointer:
    """The local checkpoints of a run, on a single rank. All ranks make the same calls in the same order.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        local_ranks: the ranks on this host, this one among them.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        local_ranks: Sequence[int] = (),
        files: Files | None = None,
    ) -> None:
        name, timeout_s = f"{nonce}-local", policy.saving.commit_timeout_s
        hosts = find_hosts(channel, local_ranks, f"local/{nonce}")
        files = files or FILE_SYSTEM
        self._channel, self._nonce, self._waits = channel, name, 0
        self._copies = Copies(channel, hosts, nonce=name, count=policy.copies, timeout_s=timeout_s)
        saving = replace(
            policy.saving,
            folder=policy.folder,
            save_interval=policy.save_interval,
            retention=Retention(policy.keep, named=policy.saving.retention.named),
        )
        self.saver = Checkpointer(
            saving,
            channel,
            nonce=name,
            files=files,
            local_ranks=local_ranks,
            hosts=hosts,
            local=LocalSaves(FileExchange(), self._copies),
        )
        self.folders = HostFolders(
            CheckpointFolder(policy.folder, files, policy.saving.terms),
            channel,
            hosts,
            nonce=name,
            timeout_s=timeout_s,
        )

    def start(self, lineage: Lineage | None = None) -> None:
        """Take the locks, settle the remains of dead attempts, and survey the checkpoints on every host.

        Args:
            lineage: of the run; None to take every checkpoint as its own.

        Raises:
            LockError: on every rank, if another job writes to the folder of a host.
            CheckpointError: on every rank, if a folder cannot be written, or the ranks of a host see different folders.
        """
        self.saver.start()
        self.folders.lineage = lineage or Lineage()
        self.folders.survey()
        self._copies.found(self.folders.copied(self._copies.count))

    def loaded(self, restored: Restored) -> None:
        """Take note of the checkpoint at the start of the run."""
        self.saver.loaded(restored)
        if self.folders.owns(restored.checkpoint.path):
            self._copies.loaded(restored.checkpoint.iteration)

    def rewind(self, iteration: int) -> None:
        """Rename checkpoints overtaken by this run, newer than `iteration` or given up before, out of the way."""
        self._copies.rewound(iteration)
        self.saver.rewind(iteration, self.folders.given_up)

    def await_copies(self) -> None:
        """Wait a while for the running copies on any host, for the next checkpoint to be copied too.

        The ranks go on together: in a save that follows, none waits for another that still waits for a copy.

        Raises:
            LaunchError: if a rank is lost.
        """
        self.saver.wait()
        self._copies.wait(min(_COPIES_S, self._channel.timeout_s / 2))
        self._waits += 1
        self._channel.agree(f"local/{self._nonce}/copies/{self._waits}", None)

    @property
    def sent_bytes(self) -> int:
        """Return how many bytes this rank has sent to other hosts."""
        return self._copies.sent_bytes

    def close(self) -> None:
        """Wait for the running save and copies, and release the locks."""
        self.saver.wait()
        self._copies.close()
        self.saver.close()
