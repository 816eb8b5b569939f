"""A local checkpoint's share in one host's folder."""

from __future__ import annotations

from dataclasses import dataclass

from reprise.loading.blocks import bytes_of
from reprise.loading.reader import Checkpoint, tensor_bytes


@dataclass(frozen=True, slots=True)
class HostShare:
    """A local checkpoint's share in one host's folder.

    Args:
        host: The name of the host that saves to the folder. None for a folder with copies alone.
        hosts: The names of all hosts that saved the checkpoint.
        present_bytes: The size of the pieces in the folder, in bytes.
        total_bytes: The size of all tensors in the checkpoint, in bytes.
        missing: The parts not whole in the folder, in words. Empty if there are none.
    """

    host: str | None
    hosts: tuple[str, ...]
    present_bytes: int
    total_bytes: int
    missing: str

    def __str__(self) -> str:
        """Return the share in words: `50 % of 2 hosts: a; missing 1 of 2 parts: b`."""
        percent = min(99, round(100 * self.present_bytes / max(1, self.total_bytes))) if self.missing else 100
        text = f"{percent} % of {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}: {self.host or 'copies alone'}"
        return f"{text}; missing {self.missing}" if self.missing else text


def share_of(checkpoint: Checkpoint) -> HostShare | None:
    """Return the checkpoint's share in its folder, or None unless it is a host's folder."""
    host = checkpoint.host
    if host is None:
        return None
    return HostShare(
        host=None if host.host is None else host.hosts[host.host],
        hosts=tuple(host.hosts),
        present_bytes=bytes_of(checkpoint, host.held),
        total_bytes=tensor_bytes(checkpoint),
        missing=host.parts.describe_missing(),
    )
