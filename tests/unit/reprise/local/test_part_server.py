"""What a host serves to the mirrors of others, and what it refuses."""

from __future__ import annotations

import errno
import json
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from reprise.format.manifest import digest_of
from reprise.loading.reader import read_places
from reprise.local.host_part import HostPart
from reprise.local.part_client import PartClient
from reprise.storage.folder import iteration_name
from reprise.storage.holds import Hold
from tests.unit.reprise.local.sites import Site

ITERATION = 2


@pytest.fixture
def site(saved_hosts: Path, tmp_path: Path, stack: ExitStack) -> Site:
    return Site(saved_hosts / "copies0", tmp_path, stack)


def part_of(site: Site, host: int) -> HostPart:
    manifest = (site.folders[host] / iteration_name(ITERATION) / "manifest.json").read_bytes()
    part = site.parts[host].find(ITERATION, digest_of(manifest))
    assert part is not None
    return part


def test_pieces_of_a_host_arrive_with_their_digests(site: Site) -> None:
    own, other = part_of(site, 0), part_of(site, 1)
    parts, silent = site.client(0).parts(own)
    assert (parts, silent) == ({0: own.summary, 1: other.summary}, {})
    blocks = site.client(0).pieces(1, own.checkpoint, read_places(own.checkpoint), other.host.held)
    assert [digest_of(data.tobytes()) == block.digest for block, data in blocks] == [True] * 3


@pytest.mark.parametrize("token", ["another", "", "a token too long"])
def test_another_token_is_refused(site: Site, token: str) -> None:
    client = PartClient(replace(site.peers(0), token=token), 0, timeout_s=1.0)
    parts, silent = client.parts(part_of(site, 0), order="hold")
    assert list(parts) == [0]
    assert "refused" in str(silent[1]) or "reset" in str(silent[1]) or "does not answer" in str(silent[1])
    assert site.held() == []


@pytest.mark.parametrize(
    "line", [b"no json\n", b"[]\n", b'{"order": "pieces"}\n', b'{"order": "part", "iteration": "x", "manifest": ""}\n']
)
def test_a_malformed_request_ends_its_connection_alone(site: Site, line: bytes) -> None:
    with socket.create_connection(site.addresses[1], 5.0) as connection:
        connection.sendall(site.peers(0).token.encode() + line)
        assert connection.recv(1) == b""
    assert list(site.client(0).parts(part_of(site, 0))[0]) == [0, 1]


def test_an_order_whose_host_waits_no_more_is_not_followed(site: Site) -> None:
    own = part_of(site, 1)
    order = {"order": "hold", "iteration": ITERATION, "manifest": own.checkpoint.digest}
    request = site.peers(0).token.encode() + json.dumps(order).encode() + b"\n"
    sender, receiver = socket.socketpair()
    sender.sendall(request)
    sender.close()
    site.servers[1]._serve(receiver)
    assert site.parts[1].chosen is None
    assert site.held() == []
    sender, receiver = socket.socketpair()
    with sender:
        sender.sendall(request)
        site.servers[1]._serve(receiver)
        assert site.held() == [iteration_name(ITERATION)]


def test_a_hold_ends_with_the_next_and_with_a_release(site: Site) -> None:
    client, own = site.client(0), part_of(site, 0)
    client.parts(own, order="hold")
    assert site.held() == [iteration_name(ITERATION)]
    assert site.servers[1].wake.is_set()
    older = json.loads((site.folders[1] / iteration_name(1) / "host.json").read_bytes())["manifest_xxh3_64"]
    assert site.parts[1].hold(1, older) is not None
    assert site.held() == [iteration_name(1)]
    client.tell("release")
    assert site.held() == []
    assert site.parts[1].chosen is None


def test_what_a_host_lacks_or_answers_wrongly_names_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    own, client = part_of(site, 0), site.client(0)
    with pytest.raises(OSError, match="does not have these pieces"):
        next(client.pieces(1, own.checkpoint, read_places(own.checkpoint), own.host.held))
    assert [site.parts[1].find(iteration, "another") for iteration in (ITERATION, 9)] == [None, None]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Hold, "_create", full)
    _, silent = client.parts(own, order="hold")
    assert f"host1/{iteration_name(ITERATION)}: No space left on device" in str(silent[1])
    site.servers[1]._answer = lambda _: ({"part": [1, 2]}, ())  # type: ignore[method-assign]
    _, silent = client.parts(own)
    assert silent[1].filename == f"127.0.0.1:{site.addresses[1][1]}"
