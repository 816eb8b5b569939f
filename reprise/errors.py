"""Error types. A message has five parts: the failure, its place, the expected and the found value, and the fix."""

from __future__ import annotations

# Text from a file may have any length; a message is logged and sent between ranks.
_MOST_CHARACTERS = 4000


def count_of(number: int, noun: str, ending: str = "s", *, form: str = "") -> str:
    """Return a number and its noun for a message, such as `1 rank` and `2 ranks`.

    Args:
        ending: of the plural.
        form: of the number, as in a format string.
    """
    return f"{number:{form}} {noun}{'' if number == 1 else ending}"


class TrainerError(Exception):
    """A refusal or failure caused by a user, a file or a peer.

    The message is one paragraph built from the given parts; `str(error)` can be printed without changes.

    Args:
        what: the failure, as a sentence without its period.
        where: path, tensor or rank.
        expected: the valid value or state.
        found: the actual value or state.
        fix: the action that resolves it.

    Attributes:
        is_known_to_all: whether every rank of the run has raised it: no report to them is needed then.
        is_echo: whether it repeats the failure of another rank.
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
        if not text.endswith("."):  # the last part may be another error, which is a sentence already
            text += "."
        super().__init__(text if fix is None else f"{text}{'' if fix.startswith(chr(10)) else ' '}{fix}")


def _shortened(value: object) -> str:
    text = str(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"


class ConfigError(TrainerError):
    """A configuration unfit to run, refused before anything is built."""


class DataError(TrainerError):
    """A data file, malformed or unfit for the model."""


class CheckpointError(TrainerError):
    """A failed write of a checkpoint, or a damaged or incomplete checkpoint."""


class UnreadableError(CheckpointError):
    """A checkpoint unreadable now because the file system fails; it may be valid."""


class MismatchError(CheckpointError):
    """A valid checkpoint of another run: model, data, schedule or topology differ."""


class LockError(CheckpointError):
    """Another job writes to the same folder, or its lock cannot be checked."""


class ReplicaError(CheckpointError):
    """The bits of a tensor differ between its ranks: the state of the run is damaged."""


class PartialLoadError(TrainerError):
    """A load that failed after it had begun to change live state, whose old values are gone.

    A damaged or unfit checkpoint is a CheckpointError and has changed nothing: a handler of that class may start fresh.
    """


class LaunchError(TrainerError):
    """The process group could not be formed, or a peer failed."""


class OutOfMemoryError(TrainerError):
    """A run in need of more memory than its host or its device has."""


class NonFiniteError(TrainerError):
    """A nonfinite loss or gradient."""
