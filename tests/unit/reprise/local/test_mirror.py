"""The mirrors of two hosts without a common folder, in one process: what they bring into a store together."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from reprise.format.mirror_record import MirrorRule
from reprise.format.names import HOST, MANIFEST
from reprise.local.mirror import HostPool
from reprise.local.part_client import PartClient
from reprise.local.part_server import PartServer
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, iteration_name
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.peers import Peers
from reprise.stores.url import StoreUrl
from tests.local_folders import flip, save_on_two_hosts, save_shared

TIMEOUT_S = 5.0


class Site:
    """Two hosts, a store, and the mirrors of the hosts."""

    def __init__(self, root: Path, folders: list[Path], stack: ExitStack) -> None:
        self.root, self.folders, self.store = root, folders, root / "store"
        self.url = StoreUrl.parse(f"file://{self.store}")
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in folders]
        self.now = 0.0
        self._stack = stack
        for listener in self.listeners:
            stack.callback(_close, listener)
        self.servers = [self.serve(host) for host in range(len(folders))]
        self.pools = [self.pool(host) for host in range(len(folders))]
        self.passes = [self.mirror(host) for host in range(len(folders))]

    def peers(self, host: int) -> Peers:
        addresses = [listener.getsockname() for listener in self.listeners]
        return Peers(self.listeners[host], tuple(addresses), "a token")

    def serve(self, host: int) -> PartServer:
        server = PartServer(CheckpointFolder(self.folders[host], FILE_SYSTEM), self.peers(host))
        server.start()
        self._stack.callback(server.release)
        return server

    def pool(self, host: int) -> HostPool:
        folder = CheckpointFolder(self.folders[host], FILE_SYSTEM)
        client = PartClient(self.peers(host), host, timeout_s=TIMEOUT_S)
        return HostPool(folder, self.servers[host], client, clock=lambda: self.now)

    def mirror(self, host: int, *, keep: int = 0) -> MirrorPass:
        client, rule = StoreClient(self.url.root), MirrorRule(str(self.url), 0, keep)
        return MirrorPass(
            client,
            self.url,
            self.folders[host],
            rule,
            host=host,
            hosts=len(self.folders),
            stall_s=10.0,
            clock=lambda: self.now,
            pool=self.pools[host],
        )

    def run(self) -> None:
        """Run the passes by turns until host 0 has uploaded all."""
        for _ in range(50):
            is_done = self.passes[0].run()
            self.passes[1].run()
            if is_done:
                return
        raise AssertionError("the mirrors do not come to their end")

    def committed(self) -> list[str]:
        return sorted(path.parent.name for path in self.store.rglob(MANIFEST))


def _close(listener: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def sums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two hosts, with and without copies, and a shared folder, of the same two iterations."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for copies in range(2):
            save_on_two_hosts(folder / f"copies{copies}", 1, 2, copies=copies)
    save_shared(folder / "shared", 1, 2)
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def site_of(saved: Path, root: Path, stack: ExitStack, *, copies: int = 0) -> Site:
    shutil.copytree(saved / f"copies{copies}", root / "hosts")
    return Site(root, [root / "hosts" / f"host{host}" / "local" for host in range(2)], stack)


@pytest.mark.parametrize("copies", [0, 1])
def test_the_store_has_the_files_of_a_shared_save(saved: Path, tmp_path: Path, stack: ExitStack, copies: int) -> None:
    site = site_of(saved, tmp_path, stack, copies=copies)
    site.run()
    assert site.committed() == [iteration_name(1), iteration_name(2)]
    for name in site.committed():
        assert sums(site.store / name) == sums(saved / "shared" / name)
