"""Error types. A message has five parts: the failure, its place, the expected and actual values, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

# Text from a file may be long, and a message is logged and sent between ranks.
_MOST_CHARACTERS = 4000


def count_of(number: int, noun: str, ending: str = "s", *, form: str = "") -> str:
    """Return a number and its noun for a message, such as `1 rank` and `2 ranks`.

    Args:
        ending: The plural ending.
        form: The number's format specifier, such as `,`.
    """
    return f"{number:{form}} {noun}{'' if number == 1 else ending}"


def first_of(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return at most so many items for a message, and how many more there are: `a, b and 3 more`."""
    more = f"{separator.strip(' ,')} and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


class TrainerError(Exception):
    """An operation refused or failed because of a user, a file or a peer.

    The message is a single paragraph made from the arguments. Print `str(error)` as it is.

    Args:
        what: The failure, as a sentence without its period.
        where: A path, tensor or rank.
        expected: The valid value or state.
        found: The actual value or state.
        fix: The action to take.

    Attributes:
        is_known_to_all: Whether every rank in the run has raised it, so that none needs a report.
        is_echo: Whether it repeats another rank's failure.
    """

    is_known_to_all = False
    is_echo = False

    def __init__(
        self, what: str, *, where: object = None, expected: object = None, found: object = None, fix: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix
        parts = [what if where is None else f"{what} ({_shortened(where)})"]
        if expected is not None:
            parts.append(f"expected {_shortened(expected)}")
        if found is not None:
            parts.append(f"found {_shortened(found)}")
        text = ", ".join(parts)
        if not text.endswith("."):  # the last part may be another error, which ends with a period
            text += "."
        super().__init__(text if fix is None else f"{text}{'' if fix.startswith(chr(10)) else ' '}{fix}")


def _shortened(value: object) -> str:
    text = str(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"


class ConfigError(TrainerError):
    """The configuration cannot run. Raised before anything is built."""


class DataError(TrainerError):
    """A data file is malformed or does not fit the model."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written, or is damaged or incomplete."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now because the file system fails. It may be valid."""


class MismatchError(CheckpointError):
    """A valid checkpoint belongs to another run: its model, data, schedule or topology differs."""


class LockError(CheckpointError):
    """Another job writes to the same folder, or its lock cannot be checked."""


class ReplicaError(CheckpointError):
    """A tensor's bits differ between its ranks: the run's state is damaged."""


class PartialLoadError(TrainerError):
    """A load failed after it had started to change live state, whose old values are lost.

    A damaged or unfit checkpoint raises CheckpointError instead, before anything changes: its handler may start fresh.
    """


class LaunchError(TrainerError):
    """The process group could not be formed, or a peer failed."""


class OutOfMemoryError(TrainerError):
    """A run needs more memory than its host or device has."""


class NonFiniteError(TrainerError):
    """A loss or gradient is not finite."""
