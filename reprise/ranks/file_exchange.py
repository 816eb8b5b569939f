"""Sends a checkpoint's JSON files to other hosts' leaders, each only when it has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping

from reprise.errors import CheckpointError
from reprise.format.manifest import digest_of


class FileExchange:
    """Files sent with earlier saves: rank 0 keeps their digests, the other leaders their bytes.

    A tokenizer takes megabytes in every checkpoint, and travels once.
    """

    def __init__(self) -> None:
        self._sent: dict[str, str] = {}  # by name, the digest known to every leader
        self._sending: dict[str, str] = {}
        self._kept: dict[str, bytes] = {}

    def pack(self, files: Mapping[str, bytes]) -> bytes:
        """Return the message for these files, given by name in write order. Rank 0 only."""
        self._sending = {name: digest_of(data) for name, data in files.items()}
        fresh = {name: data for name, data in files.items() if self._sent.get(name) != self._sending[name]}
        self._sent = {}  # until every leader confirms: some may keep these files, others the earlier ones
        table = [[name, digest, len(fresh[name]) if name in fresh else None] for name, digest in self._sending.items()]
        return json.dumps(table).encode() + b"\n" + b"".join(fresh.values())

    def delivered(self, *, was_taken: bool) -> None:
        """Note whether every leader has received the last message. Rank 0 only."""
        self._sent = self._sending if was_taken else {}

    def unpack(self, message: bytes) -> dict[str, bytes]:
        """Return a message's files.

        Raises:
            CheckpointError: A file was sent with a save in which this rank took no part.
        """
        head, _, blobs = message.partition(b"\n")
        files: dict[str, bytes] = {}
        at = 0
        for name, digest, length in json.loads(head):
            if length is not None:
                files[name] = blobs[at : at + length]
                at += length
            else:
                files[name] = self._kept.get(name, b"")
            if digest_of(files[name]) != digest:
                raise CheckpointError(
                    "A checkpoint file has not arrived at this host",
                    where=name,
                    expected=f"digest {digest}",
                    found="none" if not files[name] else digest_of(files[name]),
                    fix="The next save sends all files again.",
                )
        self._kept = files
        return files
