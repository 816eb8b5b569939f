"""The addresses of mirrors, and the line by which a mirror learns them."""

from __future__ import annotations

import os
import socket

import pytest

from reprise.errors import LaunchError
from reprise.stores.peers import Peers, address_of_this_host, listen


def test_a_mirror_reads_the_line_and_nothing_behind_it() -> None:
    reader, writer = os.pipe()
    with listen() as listener:
        addresses = (("host-a", 1), ("::1", listener.getsockname()[1]))
        os.write(writer, Peers(listener, addresses, "secret").line() + b"saved\n")
        found = Peers.read(reader)
        assert (found.addresses, found.token) == (addresses, "secret")
        assert os.read(reader, 100) == b"saved\n"
        with socket.create_connection(("127.0.0.1", found.addresses[1][1]), 5.0):
            found.listener.accept()[0].close()
        found.listener.detach()  # which is the same descriptor here
    os.close(writer)
    with pytest.raises(LaunchError, match="ended before"):
        Peers.read(reader)
    os.close(reader)


@pytest.mark.parametrize("first", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_the_first_host_is_reached_as_the_launch_reaches_it(first: str) -> None:
    assert address_of_this_host(first) == first
