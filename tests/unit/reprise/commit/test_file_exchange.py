"""JSON files go to other hosts once, and again only when they have changed."""

from __future__ import annotations

import pytest

from reprise.commit.file_exchange import FileExchange
from reprise.errors import CheckpointError

TOKENIZER = b"t" * 10_000


def send(sender: FileExchange, receiver: FileExchange, files: dict[str, bytes]) -> int:
    """Send files, check that they arrive in order, and return the bytes of the message."""
    message = sender.pack(files)
    assert list(receiver.unpack(message).items()) == list(files.items())
    sender.delivered(was_taken=True)
    return len(message)


def test_a_file_that_has_not_changed_is_sent_once() -> None:
    sender, receiver = FileExchange(), FileExchange()
    assert send(sender, receiver, {"tokenizer.json": TOKENIZER, "state.json": b"1"}) > len(TOKENIZER)
    assert send(sender, receiver, {"tokenizer.json": TOKENIZER, "state.json": b"2"}) < 200
    assert send(sender, receiver, {"tokenizer.json": TOKENIZER + b"!", "state.json": b"2"}) > len(TOKENIZER)


def test_a_host_that_missed_a_file_gets_all_files_next_time() -> None:
    sender, receiver = FileExchange(), FileExchange()
    sender.pack({"tokenizer.json": TOKENIZER})
    sender.delivered(was_taken=True)
    with pytest.raises(CheckpointError, match=r"has not arrived at this host \(tokenizer.json\)"):
        receiver.unpack(sender.pack({"tokenizer.json": TOKENIZER}))
    sender.delivered(was_taken=False)
    send(sender, receiver, {"tokenizer.json": TOKENIZER})


def test_an_empty_file_arrives() -> None:
    send(FileExchange(), FileExchange(), {"empty": b"", "other": b"x"})
