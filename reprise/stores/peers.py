"""Where the mirrors of hosts without a common folder reach each other: each host has a port while its run lasts.

A training process opens the port and hands it to its mirror, which may end and be started again behind it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from reprise.errors import LaunchError

_ANY_PORT = 9  # of a destination to which nothing is sent


@dataclass(frozen=True, slots=True)
class Peers:
    """The mirrors of a run.

    Args:
        listener: the port of this host.
        addresses: host and port of each mirror, by the number of its host.
        token: admits a request.
    """

    listener: socket.socket
    addresses: tuple[tuple[str, int], ...]
    token: str

    def line(self) -> bytes:
        """Return the form in which a mirror reads them, with the number of the inherited port."""
        table = {"listener": self.listener.fileno(), "addresses": self.addresses, "token": self.token}
        return json.dumps(table).encode() + b"\n"

    @staticmethod
    def read(descriptor: int) -> Peers:
        """Read the line, and nothing behind it.

        Raises:
            LaunchError: if the input ends before.
        """
        line = bytearray()
        while not line.endswith(b"\n"):
            data = os.read(descriptor, 1)
            if not data:
                raise LaunchError("The input of a mirror ended before it named the other hosts")
            line += data
        table = json.loads(line)
        addresses = tuple((str(name), int(port)) for name, port in table["addresses"])
        return Peers(socket.socket(fileno=table["listener"]), addresses, str(table["token"]))


def listen() -> socket.socket:
    """Return a listening socket on a free port of this host.

    Raises:
        LaunchError: if there is none.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))
    except OSError as error:
        raise LaunchError("No port can be opened for the mirror of this host", found=error.strerror) from error


def address_of_this_host(first: str) -> str:
    """Return the address under which the other hosts of a launch reach this one.

    It is the one of this host on the way to the first host, which every host reaches; on that host, that address.

    Args:
        first: the address of the host where the ranks of the launch meet.
    """
    for family, kind, _, _, address in _resolved(first):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = str(probe.getsockname()[0])
            return first if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
    return first


def _resolved(name: str) -> Sequence[tuple[int, int, int, str, tuple[str | int, ...]]]:
    try:
        return socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except OSError:
        return ()
