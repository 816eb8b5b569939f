"""`host.json`: written and read back, refused where it is damaged, and the arithmetic of pieces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reprise.errors import CheckpointError, MismatchError
from reprise.format.host_file import HostFile, attempt_of, from_bytes
from reprise.format.manifest import digest_of
from reprise.format.names import HOST, MANIFEST
from tests.messages import refused

WRITERS = {"a": (0, 1, 1), "b": (1,), "c": (0,)}
FILE = HostFile("n-1", "0" * 16, 0, ("host-a", "host-b"), WRITERS, {"a": (0,), "c": (0,)})


def test_a_host_file_is_read_as_it_was_written() -> None:
    for known in (FILE, replace(FILE, host=None, held={})):
        assert from_bytes(known.to_bytes(), where="x") == known


def test_a_host_owns_what_it_wrote() -> None:
    other = {"a": (1, 2), "b": (0,)}
    assert (FILE.written_by(0), FILE.written_by(1)) == (FILE.held, other)
    assert (FILE.missing, FILE.is_whole, FILE.parts.whole) == (other, False, [0])
    assert replace(FILE, held=other).parts.whole == [1]


def resigned(text: str) -> bytes:
    body = text.rpartition(',"xxh3_64"')[0]
    return f'{body},"xxh3_64":"{digest_of(body.encode())}"}}\n'.encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"host":0', '"host":2'),
        ('"held":{"a":[0]', '"held":{"a":[3]'),
        ('"held":{"a":[0]', '"held":{"a":[0,0]'),
        ('"held":{"a":[0]', '"held":{"d":[0]'),
        ('"hosts":["host-a","host-b"]', '"hosts":[]'),
        ('"a":[0,1,1]', '"a":[0,1,2]'),
        ('"attempt":"n-1",', ""),
    ],
)
def test_a_malformed_host_file_is_refused(old: str, new: str) -> None:
    text = FILE.to_bytes().decode()
    assert old in text
    with refused(CheckpointError):
        from_bytes(resigned(text.replace(old, new, 1)), where="x")


def test_a_damaged_or_newer_host_file_is_refused() -> None:
    data = FILE.to_bytes()
    with refused(CheckpointError, "x"):
        from_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:], where="x")
    with refused(MismatchError, "reprise-host/2"):
        from_bytes(resigned(data.decode().replace("reprise-host/1", "reprise-host/2")), where="x")


def test_an_attempt_is_known_by_manifest_and_host_file(tmp_path: Path) -> None:
    assert attempt_of(tmp_path) is None
    (tmp_path / MANIFEST).write_bytes(b"{}")
    (tmp_path / HOST).write_bytes(replace(FILE, manifest=digest_of(b"{}")).to_bytes())
    assert attempt_of(tmp_path) == "n-1"
    (tmp_path / MANIFEST).write_bytes(b"{ }")
    assert attempt_of(tmp_path) is None
