"""Hands the JSON files of a save down a binary tree of leaders: rank 0 sends them twice, however many hosts there are.

The hosts 1 and 2 read them from the store, as all hosts would without a tree. Host n takes them from host (n - 1) // 2
over a link of its own. The store has them still: a host whose link fails reads them there, in every later save too.
"""

from __future__ import annotations

import logging

from reprise.commit.attempt import Hosts
from reprise.commit.channel import StoreChannel
from reprise.errors import LaunchError
from reprise.local.link import Link
from reprise.storage.worker import Worker

_log = logging.getLogger(__name__)

_BRANCHES = 2
# A host that gets nothing from its parent for so long reads the store.
_PATIENCE_S = 10.0


class FileRelay:
    """The links of a leader to its parent and to its children in the tree of hosts. Implements `Relay`.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        timeout_s: how long a commit may take.
    """

    def __init__(self, channel: StoreChannel, hosts: Hosts, *, nonce: str, timeout_s: float) -> None:
        self._channel, self._nonce = channel, nonce
        self._timeout_s = min(_PATIENCE_S, timeout_s / 4)
        self._host, count = hosts.number_of(channel.rank), len(hosts.leaders)
        leads = channel.rank in hosts.leaders and self._host > 0
        first = _BRANCHES * self._host + 1
        self._children = {
            host: Worker(f"relay-{host}") for host in range(first, min(first + _BRANCHES, count)) if leads
        }
        self._parent = (self._host - 1) // _BRANCHES if leads and self._host > _BRANCHES else None
        self._links: dict[int, Link | None] = {}  # by the other host; None for a link that has failed

    def read(self, channel: StoreChannel, key: str) -> bytes:
        """Return rank 0's message under `key`, and hand it on in the background. Leaders of other hosts only.

        Raises:
            LaunchError: if it comes neither from the parent nor from the store.
        """
        data: bytes | None = None
        if self._parent is not None:
            link = self._link(self._parent, sends=False)
            try:
                data = None if link is None else link.receive_message(key)
            except LaunchError as error:
                self._give_up(self._parent, error)
        message = channel.read(key, sender=f"rank {channel.coordinator}") if data is None else data
        for child, worker in self._children.items():
            worker.submit(lambda child=child: self._send(child, key, message))  # type: ignore[misc]
        return message

    def close(self) -> None:
        """Close the links."""
        for worker in self._children.values():
            worker.close(0.0)
        for link in filter(None, tuple(self._links.values())):  # a worker that is left behind may add one
            link.close()

    def _send(self, child: int, key: str, message: bytes) -> None:
        link = self._link(child, sends=True)
        try:
            if link is not None:
                link.send_message(key, message)
        except LaunchError as error:
            self._give_up(child, error)

    def _link(self, host: int, *, sends: bool) -> Link | None:
        """Return the link to a host, opened with the first message; None if it has failed."""
        if host not in self._links:
            source, target = (self._host, host) if sends else (host, self._host)
            name = f"{self._nonce}/files/{source}-{target}"
            try:
                self._links[host] = Link(self._channel, name, sends=sends, timeout_s=self._timeout_s)
            except LaunchError as error:
                self._give_up(host, error)
        return self._links[host]

    def _give_up(self, host: int, error: LaunchError) -> None:
        link, self._links[host] = self._links.get(host), None
        if link is not None:
            link.close()
        _log.warning("JSON files of saves come from the store, not from host to host: %s", str(error).rstrip("."))
