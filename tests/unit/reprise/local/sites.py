"""Hosts without a common folder and their mirrors, in one process; a folder stands for the store."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from reprise.format.mirror_record import MirrorRule
from reprise.format.names import MANIFEST
from reprise.local.host_part import HostParts
from reprise.local.mirror import HostPool
from reprise.local.part_client import PartClient
from reprise.local.part_server import PartServer
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.peers import Peers
from reprise.stores.url import StoreUrl

TOKEN = "a token"


class Site:
    """Hosts, a store, and the mirrors of the hosts.

    Args:
        saved: the folders of two hosts.
        hosts: which of the two each host has a copy of.
        client: makes the client of the store for a host.
        keep: number of newest checkpoints that stay in the store; 0 keeps all.
    """

    def __init__(
        self,
        saved: Path,
        root: Path,
        stack: ExitStack,
        *,
        hosts: Sequence[int] = (0, 1),
        client: Callable[[str, int], StoreClient] = lambda url, _: StoreClient(url),
        timeout_s: float = 5.0,
        keep: int = 0,
    ) -> None:
        self.folders = [root / f"host{number}" for number in range(len(hosts))]
        for host, folder in zip(hosts, self.folders, strict=True):
            shutil.copytree(saved / f"host{host}" / "local", folder)
        self.store = root / "store"
        self.url = StoreUrl.parse(f"file://{self.store}")
        self.now = 0.0
        self._client, self._stack, self._timeout_s, self._keep = client, stack, timeout_s, keep
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.folders]
        self.addresses = [listener.getsockname() for listener in self.listeners]
        self.parts = [self._parts(host) for host in range(len(hosts))]
        self.servers = [self._serve(host) for host in range(len(hosts))]
        self.pools = [self._pool(host) for host in range(len(hosts))]
        self.passes = [self._mirror(host) for host in range(len(hosts))]

    def peers(self, host: int) -> Peers:
        return Peers(self.listeners[host], tuple(self.addresses), TOKEN)

    def client(self, host: int) -> PartClient:
        return PartClient(self.peers(host), host, timeout_s=self._timeout_s)

    def _parts(self, host: int) -> HostParts:
        parts = HostParts(CheckpointFolder(self.folders[host], FILE_SYSTEM))
        self._stack.callback(parts.release)
        return parts

    def _serve(self, host: int) -> PartServer:
        server = PartServer(self.parts[host], self.peers(host))
        server.start()
        self._stack.callback(close, self.listeners[host])
        return server

    def _pool(self, host: int) -> HostPool:
        return HostPool(self.parts[host], self.servers[host], self.client(host), clock=lambda: self.now)

    def _mirror(self, host: int) -> MirrorPass:
        return MirrorPass(
            self._client(self.url.root, host),
            self.url,
            self.folders[host],
            MirrorRule(str(self.url), keep=self._keep),
            host=host,
            hosts=len(self.folders),
            stall_s=10.0,
            clock=lambda: self.now,
            pool=self.pools[host],
        )

    def restart(self, host: int) -> None:
        """Start the mirror of a host again at its port, as after its death, which ends its hold."""
        self.parts[host].release()
        close(self.listeners[host])
        self.listeners[host] = socket.create_server(self.addresses[host])
        self.parts[host] = self._parts(host)
        self.servers[host] = self._serve(host)
        self.pools[host] = self._pool(host)
        self.passes[host] = self._mirror(host)

    def run(self) -> None:
        """Run the passes by turns until host 0 has uploaded all."""
        for _ in range(50):
            is_done = self.passes[0].run()
            for passes in self.passes[1:]:
                passes.run()
            if is_done:
                return
        raise AssertionError("the mirrors do not come to their end")

    def committed(self) -> list[str]:
        return sorted(path.parent.name for path in self.store.rglob(MANIFEST))

    def held(self) -> list[str]:
        """Return the checkpoints that are held, on any host."""
        return [path.parent.name for folder in self.folders for path in sorted(folder.glob("*/hold.*"))]


def close(listener: socket.socket) -> None:
    """Let nothing answer at a port any more; calling it again is fine."""
    if listener.fileno() >= 0:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def sums(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
