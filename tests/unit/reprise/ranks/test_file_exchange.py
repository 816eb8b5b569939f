"""JSON files go to other hosts once, and again only when they have changed."""

from __future__ import annotations

from reprise.errors import CheckpointError
from reprise.ranks.file_exchange import FileExchange
from tests.messages import refused

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
    with refused(CheckpointError, "tokenizer.json"):
        receiver.unpack(sender.pack({"tokenizer.json": TOKENIZER}))
    sender.delivered(was_taken=False)
    send(sender, receiver, {"tokenizer.json": TOKENIZER, "empty": b""})
    message = sender.pack({"tokenizer.json": TOKENIZER})
    assert len(message) < 200
    assert len(sender.pack({"tokenizer.json": TOKENIZER})) > len(TOKENIZER)  # nobody has learned of the message before
