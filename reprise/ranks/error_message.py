"""Errors as messages between ranks. Classes that callers distinguish survive."""

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

_MOST_CHARACTERS = 4000  # from another library's error
_KINDS: dict[str, type[TrainerError]] = {
    kind.__name__: kind for kind in (DataError, MismatchError, LockError, LaunchError, UnreadableError)
}


def as_problem(error: BaseException) -> TrainerError:
    """Return an error as a TrainerError: itself if it is one, else one with its class name and text."""
    if isinstance(error, TrainerError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS].rstrip(": ."))


def pack(problem: TrainerError, rank: int | None = None) -> str:
    """Return an error as a message for any store; `unpack` restores its class and text.

    Args:
        rank: The failed rank, for the text. None if the error is every rank's.
    """
    text = str(problem).rstrip(".") if rank is None else f"Rank {rank}: {str(problem).rstrip('.')}"
    return f"{type(problem).__name__}\n{text}".encode(errors="backslashreplace").decode()


def unpack(message: str) -> TrainerError:
    """Return an error which all ranks learn. A class without meaning to other ranks becomes CheckpointError."""
    kind, _, text = message.partition("\n")
    error = _KINDS.get(kind, CheckpointError)(text)
    error.is_known_to_all = True
    return error
