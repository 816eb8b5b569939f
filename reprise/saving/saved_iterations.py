"""Remembers which iteration is saved already, and the attempts whose outcome this rank does not know yet."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from reprise.commit import messages
from reprise.commit.attempt import Attempt, SharedCommitState
from reprise.commit.commit_state import Outcome

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InDoubt:
    """An attempt that this rank stopped waiting for when it could still be committed. It holds none of its bytes."""

    attempt: Attempt
    shared: SharedCommitState
    has_optimizer: bool

    def is_committed(self) -> bool:
        """Return whether it became a checkpoint after all. Main thread."""
        outcome = self.shared.current.outcome
        return outcome is Outcome.COMMITTED or (outcome is not Outcome.FAILED and messages.is_committed(self.attempt))


class SavedIterations:
    """The newest checkpoint that this process has saved or loaded, and what may have become one. Main thread.

    Only the newest is asked about: a run ends with a save of the iteration that it has just saved or loaded. An older
    iteration is saved again, whether retention has deleted it or not.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, bool] | None = None  # the iteration, and whether it holds optimizer state
        self._verified: int | None = None  # a loaded checkpoint of which all digests were checked
        self._outdated: tuple[int, bool] | None = None  # a loaded checkpoint, like `_newest`, to be saved again
        self.damaged: frozenset[int] = frozenset()  # checkpoints that the load skipped
        self.in_doubt: list[InDoubt] = []  # in the order of the attempts

    def has(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether `iteration` is saved already, with its optimizer state if that is asked for."""
        return self._newest is not None and self._newest[0] == iteration and self._newest[1] >= with_optimizer

    def committed(self, iteration: int, *, has_optimizer: bool) -> None:
        """Take note of a commit. Rank 0 makes one attempt after the other, so all before it are decided."""
        self._newest = iteration, has_optimizer
        self.in_doubt.clear()

    def loaded(self, iteration: int, has_optimizer: bool, *, is_verified: bool) -> None:
        """Take note of a checkpoint of this run's folder that was loaded: it is there."""
        self._newest = iteration, has_optimizer
        self._verified = iteration if is_verified else None

    def is_verified(self, iteration: int) -> bool:
        """Return whether this process has loaded `iteration` and checked all of it."""
        return self._verified == iteration

    def outdated(self, iteration: int) -> None:
        """Let `iteration` be saved again, in place of the checkpoint that was loaded.

        One that this process has not loaded is another: nothing shows that it may go.
        """
        if self._newest is not None and self._newest[0] == iteration:
            self._newest, self._outdated = None, self._newest

    def gives_way(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether the checkpoint of `iteration` is outdated, and a save of it has all that it has."""
        return self._outdated is not None and self._outdated[0] == iteration and with_optimizer >= self._outdated[1]

    def rewound(self, iteration: int) -> None:
        """Forget checkpoints newer than `iteration`, which were renamed."""
        if self._newest is not None and self._newest[0] > iteration:
            self._newest = None
        self.in_doubt = [candidate for candidate in self.in_doubt if candidate.attempt.iteration <= iteration]

    def settle(self, rank: int) -> None:
        """Find out which attempts in doubt were committed all the same: of several, the last one counts."""
        for number, candidate in reversed(list(enumerate(self.in_doubt))):
            if candidate.is_committed():
                _log.info("iteration %d, in doubt on rank %d, was committed", candidate.attempt.iteration, rank)
                self._newest = candidate.attempt.iteration, candidate.has_optimizer
                del self.in_doubt[: number + 1]
                break
        self.in_doubt = [
            candidate for candidate in self.in_doubt if candidate.shared.current.outcome is not Outcome.FAILED
        ]
