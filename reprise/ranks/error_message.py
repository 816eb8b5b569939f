"""Errors as messages between ranks, which keep the classes that callers tell apart."""

from __future__ import annotations

from reprise.errors import (
    CheckpointError,
    DataError,
    LaunchError,
    LockError,
    MismatchError,
    TrainerError,
    UnreadableError,
)

_MOST_CHARACTERS = 4000  # of an error of another library
_KINDS: dict[str, type[TrainerError]] = {
    kind.__name__: kind for kind in (DataError, MismatchError, LockError, LaunchError, UnreadableError)
}


def as_problem(error: BaseException) -> TrainerError:
    """Return an error as one that ranks share: a TrainerError itself, any other by its class and its text."""
    if isinstance(error, TrainerError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS].rstrip(": ."))


def pack(problem: TrainerError) -> str:
    """Return an error as a message that every store takes; `unpack` returns its class and its text."""
    text = f"{type(problem).__name__}\n{str(problem).rstrip('.')}"
    return text.encode(errors="backslashreplace").decode()


def unpack(message: str) -> tuple[type[TrainerError], str]:
    """Return the class and the text of an error: CheckpointError for one that only its own rank needs to tell apart."""
    kind, _, text = message.partition("\n")
    return _KINDS.get(kind, CheckpointError), text
