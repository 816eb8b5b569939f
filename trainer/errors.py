"""The errors of the project: what failed, where, expected, found, and what to do.

Where an error is decided is the business of the module that knows the rule; this one only gives it a shape.
"""

from __future__ import annotations

# What a file says may be of any length, a message may not: it is logged, and travels between ranks.
_MOST_CHARACTERS = 4000


class TrainerError(Exception):
    """A refusal or failure that a user, a file or a peer caused.

    The message is one paragraph built from the parts that are given; `str(error)` is fit to be printed as it is.

    Args:
        what: what failed, as a sentence without its final stop.
        where: path, tensor or rank.
        expected: what would have been right.
        found: what was there.
        fix: what the reader can do about it.

    Attributes:
        is_known_to_all: whether every rank of the run has it, so that none needs to be told.
    """

    is_known_to_all = False

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
    """A configuration that cannot run, refused before anything is built."""


class DataError(TrainerError):
    """A data file that is not what it says, or does not suit the model."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written, or is not whole."""


class UnreadableError(CheckpointError):
    """A checkpoint that cannot be read now: the file system fails, which says nothing of what it holds."""


class MismatchError(CheckpointError):
    """A valid checkpoint of another run: model, data, schedule or topology differ."""


class LockError(CheckpointError):
    """Another job writes to the same folder, or nobody can tell."""


class ReplicaError(CheckpointError):
    """Ranks that hold the same tensor hold different bits of it: the state of the run is damaged."""


class LaunchError(TrainerError):
    """The process group could not be formed, or a peer failed."""


class NonFiniteError(TrainerError):
    """A loss or a gradient that is no finite number."""
